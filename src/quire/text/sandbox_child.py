"""The process in which `sandbox` renders: `python -m quire.text.sandbox_child`, started by it and by nobody else.

Reads jobs from standard input and ends with it. Limits itself before it reads: memory, no file or socket that is not
open by then; a job that nobody waits for any more ends by an alarm.
"""

import functools
import marshal
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

import jinja2

from quire.contracts.errors import InvalidParameter
from quire.text.chat import ChatTemplate
from quire.text.jinja import compile_template
from quire.text.sandbox import MOST_TEXT, READY

# What Python and Jinja read from files, they read when it is first used.
WARM_UP = (r"{{ '\u00e9' ~ strftime_now('%c') ~ messages | tojson(indent=1) }}", "{{ raise_exception('a') }}")


def main(seconds: int, memory: int) -> None:
    """Answer one job after the other, none of which takes more than seconds; `memory` in bytes."""
    for source in WARM_UP:
        render(marshal.dumps(({"default": source}, {})), ([{"role": "user", "content": "a"}], {}))
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 0),
                        (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS knows no bound of memory
            resource.setrlimit(kind, (limit, limit))
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while head := jobs.read(8):
        job = jobs.read(int.from_bytes(head))
        signal.alarm(seconds)
        status, text = render(*marshal.loads(job))
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MOST_TEXT:
            status, data = "long", b""
        answers.write(b"%s %d\n%s" % (status.encode(), len(data), data))
        answers.flush()
        signal.alarm(0)


def render(template: bytes, arguments: tuple[Any, dict[str, Any]]) -> tuple[str, str]:
    """How it ended ("text", "refused", "memory"), and the text, or the name of the parameter and the message."""
    messages, options = arguments
    try:
        return "text", _template(template).render_here(messages, **options)
    except InvalidParameter as error:
        return "refused", f"{error.param or ''}\n{error}"
    except jinja2.TemplateSyntaxError as error:
        return "refused", f"\nthe chat template is not valid Jinja (line {error.lineno}: {error.message}): correct it."
    except MemoryError:
        return "memory", ""
    except Exception as error:  # which this process survives, and of which nobody else hears
        return "refused", f"\nthe chat template cannot be rendered ({type(error).__name__})."


@functools.lru_cache(maxsize=4)
def _template(template: bytes) -> ChatTemplate:
    """By what it is made of, so that one which comes again is not compiled again."""
    sources, variables = marshal.loads(template)
    return ChatTemplate(sources, variables, compiler=compile_template)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
