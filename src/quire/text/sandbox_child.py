"""The process in which `sandbox` renders: `python -m quire.text.sandbox_child`. Only `sandbox` starts it.

It reads jobs from standard input and ends with it. Before the first job it limits its memory, and forbids itself to
open files and sockets. An alarm ends a job whose caller is gone.
"""

import functools
import marshal
import resource
import signal
import sys
from typing import Any

import jinja2

from quire.contracts.errors import InvalidParameter
from quire.text.chat import ChatTemplate
from quire.text.children import limit_resources, receive, send
from quire.text.jinja import compile_template
from quire.text.sandbox import MOST_TEXT, READY

# Python and Jinja read some files at the first use of a feature: used here, before files are forbidden.
WARM_UP = (r"{{ '\u00e9' ~ strftime_now('%c') ~ messages | tojson(indent=1) }}", "{{ raise_exception('a') }}")


def main(seconds: int, memory: int) -> None:
    """Render chat templates: jobs from stdin, texts to stdout. `seconds`: limit of a job; `memory`: limit in bytes."""
    for source in WARM_UP:
        render(marshal.dumps(({"default": source}, {})), ([{"role": "user", "content": "a"}], {}))
    limit_resources({resource.RLIMIT_AS: memory, resource.RLIMIT_NOFILE: 3})
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    send(answers, READY)
    while job := receive(jobs):
        signal.alarm(seconds)
        status, text = render(*marshal.loads(job))
        data = text.encode("utf-8", "surrogatepass")
        send(answers, b"%s\n%s" % (status.encode(), data) if len(data) <= MOST_TEXT else b"long\n")
        signal.alarm(0)


def render(template: bytes, arguments: tuple[Any, dict[str, Any]]) -> tuple[str, str]:
    """Render a marshalled template with `arguments` (messages, options). Return (status, text). By status, text is:

    text      the rendered prompt
    refused   name of the parameter, a line break, and the message of the error
    memory    "": the limit of memory was reached
    """
    messages, options = arguments
    try:
        return "text", _template(template).render_here(messages, **options)
    except InvalidParameter as error:
        return "refused", f"{error.param or ''}\n{error}"
    except jinja2.TemplateSyntaxError as error:
        return "refused", f"\nthe chat template is not valid Jinja (line {error.lineno}: {error.message}): correct it."
    except MemoryError:
        return "memory", ""
    except Exception as error:  # reported to the caller; this process goes on
        return "refused", f"\nthe chat template cannot be rendered ({type(error).__name__})."


@functools.lru_cache(maxsize=4)
def _template(template: bytes) -> ChatTemplate:
    """Compile a template, or return a cached one with the same sources and variables."""
    sources, variables = marshal.loads(template)
    return ChatTemplate(sources, variables, compiler=compile_template)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
