"""A multi-turn agent in sglang.lang that changes adapters from call to call and turns back to earlier ones.

Start the server of README.md (or one with your own model and adapters), then run the agent::

    python -m sglang.launch_server --model-path examples/embedded_model/model --lora-tree \
        --lora-paths math=examples/embedded_model/adapters/math json=examples/embedded_model/adapters/json \
                     polite=examples/embedded_model/adapters/polite
    python examples/agent.py --url http://localhost:30000

Every turn prints the mix, the prompt's tokens, how many of them came from history KV, and the answer. KV depends on the
adapters that computed it, so a turn finds what earlier turns under the same mix left, and nothing of the others.
"""

import argparse
from typing import Any

from sglang.lang.chat_template import ChatTemplate, register_chat_template

from sglang_lora_tree.lang import Adapters, RuntimeEndpoint, assistant, function, gen, user

# The chat format of examples/embedded_model. For another model give --chat-template (see sglang.lang.chat_template).
register_chat_template(
    ChatTemplate(
        name="embedded",
        default_system_prompt=None,
        role_prefix_and_suffix={"user": ("<|user|>", ""), "assistant": ("<|assistant|>", "<|eos|>")},
    )
)

TURNS: list[tuple[str, Adapters]] = [
    ("Nora lives in Oslo. Ivan likes soup. Where does Nora live?", None),
    ("What does Ivan like?", "json"),
    ("Ivan has 12 pears and gets 30 pears. How many pears does Ivan have?", "math"),
    ("How many pears does Ivan have?", {"math": 0.7, "json": 0.3}),
    ("Where does Nora live?", "json"),
    ("Ivan has 5 coins and gets 7 coins. How many coins does Ivan have?", {"math": 1.0, "polite": 1.0}),
    ("How many coins does Ivan have?", {"math": 0.7, "json": 0.3}),
    ("Tell me what Ivan likes.", None),
]
REVIEWERS: list[Adapters] = ["polite", "json", {"polite": 0.5, "json": 0.5}]


@function
def agent(s: Any) -> None:
    for number, (question, adapters) in enumerate(TURNS):
        name = f"turn{number}"
        s += user(question) + assistant(gen(name, adapters=adapters))
        show(adapters, s.get_meta_info(name), s[name])
    # The same question to three reviewers at once: a fork per mix.
    s += user("Where does Nora live?")
    reviews = s.fork(len(REVIEWERS))
    for review, adapters in zip(reviews, REVIEWERS, strict=True):
        review += assistant(gen("review", adapters=adapters))
    s += assistant(reviews[0]["review"])
    for review, adapters in zip(reviews, REVIEWERS, strict=True):
        show(adapters, review.get_meta_info("review"), review["review"])


def show(adapters: Adapters, meta: dict[str, Any], answer: str) -> None:
    reused = f"{meta['cached_tokens']:4d} of {meta['prompt_tokens']:4d} prompt tokens from history KV"
    print(f"{adapters or 'base'!s:32} {reused}  {answer!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--chat-template", default="embedded")
    arguments = parser.parse_args()
    backend = RuntimeEndpoint(arguments.url, chat_template_name=arguments.chat_template)
    agent.run(backend=backend, max_new_tokens=64, temperature=0.0, stop=["<|eos|>"])


if __name__ == "__main__":
    main()
