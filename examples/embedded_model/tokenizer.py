"""The byte-level tokenizer: token id = byte value, then five special tokens; no merges; any UTF-8 text round-trips."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)  # ids 256 to 260, as corpus.py names them
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_characters() -> list[str]:
    """The character for each byte in a ByteLevel vocabulary: printable bytes are themselves, others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def save_tokenizer(folder: Path, max_length: int) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # the class' name since transformers 5 is unknown to transformers 4
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
