"""A task of lm-eval: log-likelihoods of continuations, a text, and a chat; no model hub."""

import json
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}

from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from scenario import MODEL, Facts, close, main

SCORES = """\
task: quire_scores
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{[continuation, ' zebra']}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXTS = """\
task: quire_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{text}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\0"], max_gen_toks: {most}, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def evaluated(facts: Facts, name: str, words: str, rows: list[dict[str, Any]], kind: str, **options: Any) -> Any:
    """The result of one task over these rows, and its samples."""
    data = facts.folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (facts.folder / f"{name}.yaml").write_text(words.format(data=data, most=60 if "chat" in kind else 24))
    route = "/chat/completions" if "chat" in kind else "/completions"
    arguments = {
        "model": MODEL,
        "base_url": facts.base + route,
        "max_length": 1024,
        "num_concurrent": 2,
        "max_retries": 1,
    } | ({} if "chat" in kind else {"tokenizer_backend": "auto"})
    made = lm_eval.simple_evaluate(
        kind,
        model_args=arguments,
        tasks=[name],
        log_samples=True,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(facts.folder), include_defaults=False),
        **options,
    )
    return made["results"][name], sorted(made["samples"][name], key=lambda sample: sample["doc_id"])


def scores(facts: Facts) -> None:
    """Both numbers of a continuation: how likely it is, and whether greedy decoding writes it."""
    rows = [{"context": context, "continuation": continuation} for context, continuation, *_ in facts.scores]
    _, samples = evaluated(facts, "quire_scores", SCORES, rows, "local-completions")
    found = [sample["filtered_resps"][0] for sample in samples]
    assert close((float(score) for score, _ in found), (score for _, _, score, _ in facts.scores)), found
    assert [str(greedy) == "True" for _, greedy in found] == [greedy for *_, greedy in facts.scores]
    assert {greedy for *_, greedy in facts.scores} == {True, False}


def texts(facts: Facts) -> None:
    rows = [{"prompt": prompt, "text": text} for prompt, text in facts.texts.items()]
    results, samples = evaluated(facts, "quire_texts", TEXTS, rows, "local-completions")
    assert [sample["filtered_resps"][0] for sample in samples] == list(facts.texts.values())
    assert results["exact_match,none"] == 1.0


def chats(facts: Facts) -> None:
    rows = [{"prompt": question, "text": text} for question, text in facts.chats.items()]
    results, _ = evaluated(facts, "quire_texts", TEXTS, rows, "local-chat-completions", apply_chat_template=True)
    assert results["exact_match,none"] == 1.0


main("lm-eval", scores, texts, chats)
