"""A request's mixes: the several fields in which a body may name adapters, brought together into one value per prompt.

No SGLang here. Fields: ``lora_path`` (SGLang), ``lora`` (llama.cpp), ``merged_adapters`` (LoRAX) and ``model``
(OpenAI: an adapter's name, ``base:adapter``, ``base:math:0.7,json:0.3``, or the mix alone). Each holds one mix for
the whole request or, except ``model``, a list with one mix per prompt. A list whose elements are entries with a name
is one mix, not one per prompt. Fields that say the same are fine; fields that disagree are an error, because any
choice between them would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lora_tree.composite.mix import Mix, MixError, decode_json, is_one_mix, parse_mix, refuse_repeats

PER_PROMPT_FIELDS = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that are for all prompts of a batch, or a list with one for each."""
HEALTH_CHECK = "HEALTH_CHECK"
"""How ids of SGLang's own health checks begin."""
MIX_FIELDS = ("lora_path", "lora", "merged_adapters")
LEAST_PENALTY = 1e-3
"""Of ``repetition_penalty``: a log probability divided by less, then by a small temperature, is beyond float32."""
SESSION_FIELDS: Mapping[str, type] = {"id": str, "rid": str, "offset": int, "replace": bool, "drop_previous_output": bool}


class UnknownModelError(MixError):
    """A ``model`` that is neither the base model, nor an adapter, nor a mix of adapters."""


@dataclass(frozen=True)
class Naming:
    """What a request may name."""

    adapters: Collection[str]
    """Every registered adapter, also those that were evicted from memory."""
    base: Sequence[str]
    """The names of the base model, first the one that it is served under."""
    max_members: int

    def parse(self, value: Any) -> Mix | None:
        return parse_mix(value, self.adapters.__contains__, self.max_members, examples=self.adapters)

    def parse_model(self, model: str) -> Mix | None:
        """The mix that an OpenAI ``model`` asks for; None is the base model.

        Raises:
            UnknownModelError: the whole string names nothing that is served.
            MixError: ``base:`` followed by something that is not a mix of known adapters.
        """
        if model in self.base:
            return None
        if model in self.adapters:
            return self.parse(model)
        for base in sorted(self.base, key=len, reverse=True):
            if base and model.startswith(f"{base}:"):
                return self.parse(model[len(base) + 1 :].strip())
        try:
            return self.parse(model)
        except MixError as error:
            raise UnknownModelError(
                f"The model {model!r} does not exist: it is neither the base model ({self.base[0]}), "
                f"nor an adapter or a mix of adapters ({error})"
            ) from None


def take_mixes(
    body: MutableMapping[str, Any], naming: Naming, *, prompt_fields: Collection[str] = (), model: str = "ignored"
) -> str | list[str | None] | None:
    """Take every mix field out of a request's body and return what they ask for, as canonical text.

    Args:
        body: the parsed JSON body; the mix fields are removed, ``model`` stays (it is echoed in the answer).
        naming: the names in force.
        prompt_fields: the fields that may hold a batch of prompts at this endpoint.
        model: "ignored"; "strict" (a name that is not served is an error); "lenient" (it is the base model).

    Returns:
        One text for all prompts, a list with one text (or None) per prompt, or None: the base model.

    Raises:
        UnknownModelError: see ``model``.
        MixError: a malformed field, a list that does not fit the batch, or fields that disagree.
    """
    refuse_lora_id(body.get("lora_id"))
    refuse_rid(body.get("rid"))
    prompts = count_prompts(body.get, prompt_fields)
    asked: dict[str, list[Mix | None]] = {}
    for field in MIX_FIELDS:
        value = body.pop(field, None)
        if value is not None:
            asked[field] = _parse_field(field, value, prompts, naming)
    name = body.get("model")
    if model != "ignored" and isinstance(name, str) and name not in naming.base:
        try:
            asked["model"] = [naming.parse_model(name)]
        except UnknownModelError:
            if model == "strict":
                raise
        except MixError as error:
            error.args = (f"model {name!r}: {error}",)
            raise
    return _agree(asked)


def restore_repeats(
    body: MutableMapping[str, Any], raw: bytes, *, model: str = "ignored", inside: str | None = None
) -> None:
    """Bring back what a JSON parser dropped from the mix fields: members that an object names twice, which add up.

    Args:
        body: parsed from ``raw``.
        raw: JSON.
        model: as for :func:`take_mixes`.
        inside: the field of the body that holds the mix fields, if they do not stand at the top.

    Raises:
        MixError: a field that names adapters is given twice.
    """
    fields = MIX_FIELDS if model == "ignored" else (*MIX_FIELDS, "model")
    holder = body if inside is None else body[inside]
    has_objects = any(isinstance(holder.get(field), (dict, list)) for field in MIX_FIELDS)
    if not has_objects and all(raw.count(f'"{field}"'.encode()) < 2 for field in fields):
        return
    parsed = decode_json(raw)
    if inside is not None:
        parsed = parsed[inside]
    refuse_repeats(parsed, "the body", fields)
    holder.update((field, parsed[field]) for field in MIX_FIELDS if field in parsed)


def refuse_lora_id(value: Any) -> None:
    """MixError if a request names an adapter by SGLang's internal id: nothing would count its use, and an id of another type
    than text stops SGLang's scheduler."""
    if value is not None:
        raise MixError('lora_id: is internal to the server; name adapters in lora, for example {"lora": {"math": 0.7}}')


def refuse_rid(value: Any) -> None:
    """MixError if a request goes by a name of the server's own health checks, which a busy scheduler drops: it would wait for
    ever, and hold its adapters."""
    for rid in value if isinstance(value, list) else [value]:
        if isinstance(rid, str) and rid.startswith(HEALTH_CHECK):
            raise MixError(f"rid {rid!r:.100}: what begins with {HEALTH_CHECK} is the server's own; choose another")


def canonical_mixes(value: Any, prompts: int | None, naming: Naming) -> str | list[str | None] | None:
    """The canonical text of a ``lora_path`` given to the Engine API; prompts is None for a single prompt."""
    return None if value is None else _agree({"lora_path": _parse_field("lora_path", value, prompts, naming)})


def count_prompts(get: Callable[[str], Any], fields: Collection[str]) -> int | None:
    """Length of the batch in the first field that is set; None for a single prompt (text, token ids or embeddings)."""
    for field in fields:
        value = get(field)
        if value is None:
            continue
        if not isinstance(value, list):
            return None
        first = value[0] if value else None
        if field == "input_embeds":  # tokens x width, one list deeper than token ids
            first = first[0] if isinstance(first, list) and first else None
        is_batch = isinstance(first, list) if field in ("input_ids", "input_embeds") else not isinstance(first, int)
        return len(value) if is_batch else None
    return None


def check_shapes(get: Callable[[str], Any], prompts: int | None) -> None:
    """Refuse fields that do not fit the prompts, where SGLang fails with an error that names none of them.

    Args:
        get: a request's field by its name.
        prompts: as :func:`count_prompts` says.

    Raises:
        ValueError: which field, and what it may be.
    """
    if get("input_embeds") in ([], [[]]):
        raise ValueError("input_embeds: is empty; give one list of numbers per token")
    if prompts is None and isinstance(get("rid"), list):
        raise ValueError("rid: a list for a single prompt; give text")
    batch = "a single prompt" if prompts is None else f"a batch of {prompts}"
    for field in PER_PROMPT_FIELDS:
        value = get(field)
        if isinstance(value, list) and len(value) != prompts:
            raise ValueError(f"{field}: a list of {len(value)} for {batch}; give one for all, or one per prompt")
    params = get("sampling_params")
    for one in params if isinstance(params, list) else [params or {}]:
        if not isinstance(one, Mapping):
            raise ValueError(f"sampling_params: an object is wanted, and {one!r:.100} is none")
        samples, patterns = one.get("n", 1), one.get("stop_regex")
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"sampling_params: n = {samples!r:.100}; give a whole number of at least 1")
        top_k = one.get("top_k")
        if isinstance(top_k, int) and top_k >= 1 << 31:
            raise ValueError(f"sampling_params: top_k = {top_k!r:.100}; give a number of tokens, or -1 for all")
        for pattern in patterns if isinstance(patterns, list) else [patterns or ""]:
            try:
                re.compile(pattern)
            except (TypeError, re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"sampling_params: stop_regex {pattern!r:.100} is no regular expression: {error}") from None


def check_fields(get: Callable[[str], Any], vocab_size: int) -> None:
    """Refuse what SGLang looks at in the scheduler only, which stops at it.

    Args:
        get: a field of one request by its name.
        vocab_size: tokens of the model.

    Raises:
        ValueError: which field, and what it may be.
    """
    start, top = get("logprob_start_len"), get("top_logprobs_num")
    if start is not None and (not isinstance(start, int) or start < -1):
        raise ValueError(f"logprob_start_len = {start!r:.100}; give a place in the prompt, or -1 for its end")
    if top is not None and not isinstance(top, int):
        raise ValueError(f"top_logprobs_num = {top!r:.100}; give a whole number")
    if (top or 0) > vocab_size:
        raise ValueError(f"top_logprobs_num {top}: this model has {vocab_size} tokens; ask for no more")
    params = get("sampling_params") or {}
    penalty, stop_ids = params.get("repetition_penalty"), params.get("stop_token_ids")
    if isinstance(penalty, float | int) and penalty < LEAST_PENALTY:
        raise ValueError(f"sampling_params: repetition_penalty = {penalty!r:.100}; give {LEAST_PENALTY} to 2 (1: none)")
    if params.get("min_new_tokens"):
        for token in stop_ids if isinstance(stop_ids, list) else ():
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                known = f"this model has tokens 0 to {vocab_size - 1}"
                raise ValueError(f"sampling_params: stop_token_ids {token!r:.100} with min_new_tokens; {known}")
    if get("token_indices_to_pool") is not None:
        raise ValueError(
            "token_indices_to_pool (setwise scores): SGLang looks for these places in what it has just computed, and of a prompt "
            "with history KV, or one in chunks, that is a part: leave the field out, and score items one by one"
        )
    session = get("session_params")
    if session is not None:
        _check_session(session)


def _check_session(session: Any) -> None:
    if not isinstance(session, Mapping):
        raise ValueError(f"session_params: an object is wanted, and {session!r:.100} is none")
    for field, value in session.items():
        kind = SESSION_FIELDS.get(field)
        if kind is None:
            raise ValueError(f"session_params: there is no {field!r:.100}; it has {', '.join(SESSION_FIELDS)}")
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"session_params: {field} = {value!r:.100} is no {kind.__name__}")


def _parse_field(field: str, value: Any, prompts: int | None, naming: Naming) -> list[Mix | None]:
    """One mix per prompt, or a list of one mix for all."""
    if not isinstance(value, list) or is_one_mix(value) or not value:
        return [_parse_item(field, value, naming)]
    if len(value) != (prompts or 1):
        batch = "a single prompt" if prompts is None else f"a batch of {prompts}"
        cure = 'one mix for the whole request is text, an object or [{"name": ..., "scale": ...}, ...]'
        raise MixError(f"{field}: a list of {len(value)} mixes for {batch}; {cure}")
    mixes: dict[str, Mix | None] = {}  # a batch usually repeats a few texts
    parsed = []
    for index, item in enumerate(value, 1):
        if not isinstance(item, str):
            parsed.append(_parse_item(f"{field}, prompt {index}", item, naming))
            continue
        if item not in mixes:
            mixes[item] = _parse_item(f"{field}, prompt {index}", item, naming)
        parsed.append(mixes[item])
    return parsed


def _parse_item(place: str, value: Any, naming: Naming) -> Mix | None:
    has_ids = isinstance(value, Mapping) and isinstance(value.get("ids"), list)
    if place.startswith("merged_adapters") and value and not has_ids:
        raise MixError(f'{place}: want {{"ids": ["math", "json"], "weights": [0.7, 0.3]}}')
    try:
        return naming.parse(value)
    except MixError as error:
        error.args = (f"{place}: {error}",)
        raise


def _agree(asked: Mapping[str, list[Mix | None]]) -> str | list[str | None] | None:
    if not asked:
        return None
    length = max(len(mixes) for mixes in asked.values())
    columns = {field: mixes if len(mixes) == length else mixes * length for field, mixes in asked.items()}
    first, *others = columns
    for field in others:
        for index, (left, right) in enumerate(zip(columns[first], columns[field], strict=True), 1):
            if left != right:
                place = f" for prompt {index}" if length > 1 else ""
                raise MixError(
                    f"two forms disagree{place}: {first} asks for {_show(left)}, {field} for {_show(right)}; "
                    "give the mix once"
                )
    texts = [None if mix is None else mix.text for mix in columns[first]]
    if not any(texts):
        return None
    return texts[0] if length == 1 else texts


def _show(mix: Mix | None) -> str:
    return "the base model" if mix is None else mix.text
