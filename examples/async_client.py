"""Many requests at once under different adapters and mixes, with OpenAI's client and in every form it can send.

    python examples/async_client.py --url http://localhost:30000

The server is that of README.md, or any with two adapters. All of these run in one batch there.
"""

import argparse
import asyncio
from typing import Any

from openai import AsyncOpenAI, BadRequestError, NotFoundError

QUESTION = "Ivan has 12 pears and gets 30 pears. How many pears does Ivan have?"


async def ask(client: AsyncOpenAI, model: str, extra_body: dict[str, Any] | None = None) -> tuple[str, Any, str]:
    messages = [{"role": "user", "content": QUESTION}]
    stream = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=48, stream=True, extra_body=extra_body
    )
    chunks = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return model, extra_body, "".join(chunks)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:30000")
    client = AsyncOpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    cards = (await client.models.list()).data
    base = next(card.id for card in cards if card.parent is None)
    first, second = [card.id for card in cards if card.parent is not None][:2]
    requests: list[tuple[str, dict[str, Any] | None]] = [
        (base, None),
        (first, None),
        (f"{base}:{second}", None),
        (f"{base}:{first}:0.7,{second}:0.3", None),
        (base, {"lora": {first: 0.7, second: 0.3}}),
        (base, {"lora": [{"name": first, "scale": 1.0}, {"name": second, "scale": -0.5}]}),
        (base, {"merged_adapters": {"ids": [first, second], "weights": [0.5, 0.5], "merge_strategy": "linear"}}),
    ]
    for model, extra_body, answer in await asyncio.gather(*(ask(client, *request) for request in requests)):
        print(f"{model} {extra_body or ''}\n    {answer!r}")
    # What is not served is refused before a stream starts, never answered by the base model.
    for request in ((f"{first}-typo", None), (base, {"lora": {f"{first}-typo": 0.5}})):
        try:
            await ask(client, *request)
        except (NotFoundError, BadRequestError) as error:
            print(f"{error.status_code} {error.message}")


if __name__ == "__main__":
    asyncio.run(main())
