"""The hooks in SGLang's tokenizer manager: from a request's mix to acquired members and one ``lora_id``.

The request object keeps a string, ``lora_path`` = the canonical text of its mix, so that everything SGLang does with
``lora_path`` (batches, n > 1, logs, counting releases) goes on working. Every request ends in
``TokenizerManager.generate_request``, whatever the endpoint or API, so that is where ``lora_path`` is settled:

- over HTTP, ``http_hooks`` read the body's fields and left the outcome in the request's scope; it replaces whatever the
  endpoint put into ``lora_path``, because SGLang's reading of ``model`` splits an adapter's name at its first colon;
- through ``sgl.Engine``, ``lora_path`` itself may be any form of the grammar.

A request that fails, is aborted or loses its client before, between or after these steps gives back every member it
acquired: SGLang releases ``lora_id`` exactly once on every such path, and the hook on ``release`` takes it apart.

Hooks are set before SGLang reads its arguments; without ``--lora-tree`` each of them does what it replaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_observability

from sglang_lora_tree.composite.lora_id import decode_lora_id, encode_lora_id
from sglang_lora_tree.composite.request_body import (
    Naming,
    canonical_mixes,
    check_fields,
    check_shapes,
    count_prompts,
    refuse_lora_id,
)
from sglang_lora_tree.config import current_settings

DEFAULT_MODEL = "default"
"""What SGLang's OpenAI endpoints take for the base model when a request has no ``model``."""
PROMPT_FIELDS = ("text", "input_ids", "input_embeds")

SCOPE_KEY = "lora_tree.mix"
"""Where an HTTP request's ASGI scope holds the mix it asks for: canonical text, a list with one per prompt, or None."""

UNLOAD_FOR_GOOD = "lora_tree_unload"
"""The request id of an unload that a user asked for, in the scheduler's eyes (the message has no other field)."""

_ACQUIRE_ATTEMPTS = 3


def naming_of(tokenizer_manager: Any) -> Naming:
    """The names in force: every adapter ever loaded, as those evicted by max_loaded_loras are loaded again on use."""
    settings = current_settings()
    assert settings is not None, "the hooks stand aside without --lora-tree"
    adapters = tokenizer_manager.lora_ref_cache
    served = tokenizer_manager.served_model_name
    # An adapter that is called like one of the base model's other names is that adapter.
    others = (name for name in (tokenizer_manager.model_path, DEFAULT_MODEL, "") if name not in adapters)
    return Naming(adapters, (served, *others), settings.max_members)


def settle_lora_path(tokenizer_manager: Any, obj: Any, request: Any = None) -> None:
    """BEFORE ``TokenizerManager.generate_request``: ``obj.lora_path`` becomes canonical text, per prompt in a batch.

    Raises:
        MixError: ``lora_path`` is malformed or does not fit the batch, or ``lora_id`` was given.
        ValueError: another field does not fit.
    """
    if current_settings() is None:
        return
    refuse_lora_id(getattr(obj, "lora_id", None))

    def get(field: str) -> Any:
        return getattr(obj, field, None)

    prompts = count_prompts(get, PROMPT_FIELDS)
    check_shapes(get, prompts)
    scope = getattr(request, "scope", {})
    if SCOPE_KEY in scope:
        obj.lora_path = scope[SCOPE_KEY]
    elif obj.lora_path is not None:
        obj.lora_path = canonical_mixes(obj.lora_path, prompts, naming_of(tokenizer_manager))


def check_request(tokenizer_manager: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """BEFORE ``TokenizerManager._validate_one_request``: what one request could send to stop the scheduler for all.

    Raises:
        ValueError: an empty prompt, tokens that the model does not have, embeddings in their place, or a field of a form that
            SGLang looks at in the scheduler only.
    """
    if current_settings() is None:
        return

    def get(field: str) -> Any:
        return getattr(obj, field, None)

    if get("positional_embed_overrides") is not None:
        raise ValueError(
            "positional_embed_overrides: KV is found by token ids, and embeddings in their place are not shown to be exact: "
            "leave the field out"
        )
    vocab_size = tokenizer_manager.model_config.vocab_size
    check_fields(get, vocab_size)
    if get_observability().enable_metrics:
        known = get_observability().tokenizer_metrics_allowed_custom_labels or ()
        unknown = [label for label in get("custom_labels") or () if label not in known]
        if unknown:
            raise ValueError(f"custom_labels: {unknown[0]!r:.100} is not among --tokenizer-metrics-allowed-custom-labels")
    if input_ids is None:
        return
    if len(input_ids) == 0:
        if get("session_params") is None:  # a session goes before its request's prompt
            raise ValueError("the prompt is empty: send at least one token")
        return
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"input_ids: there is no token {token}; this model has tokens 0 to {vocab_size - 1}")


async def acquire_members(original: Callable[..., Coroutine[Any, Any, None]], tokenizer_manager: Any, obj: Any) -> None:
    """AROUND ``TokenizerManager._resolve_lora_path``: load what was evicted, acquire every member, set ``obj.lora_id``.

    The original is called with all members in place of the mixes: it loads evicted adapters, checks
    ``max_loaded_loras`` (on adapters, which is what the setting counts), and looks all of them up before it counts
    any, so a failure leaves nothing held.
    """
    if current_settings() is None:
        return await original(tokenizer_manager, obj)
    batched = isinstance(obj.lora_path, list)
    naming = naming_of(tokenizer_manager)
    mixes = [naming.parse(text) for text in (obj.lora_path if batched else [obj.lora_path])]
    ids = await _acquire(original, tokenizer_manager, [name for mix in mixes if mix for name in mix.names])
    id_of = iter(ids)
    lora_ids = [mix and encode_lora_id([(next(id_of), weight) for _, weight in mix.members]) for mix in mixes]
    lora_paths = [mix and mix.text for mix in mixes]
    obj.lora_path, obj.lora_id = (lora_paths, lora_ids) if batched else (lora_paths[0], lora_ids[0])
    # Sub-requests that SGLang has made and cached already.
    for index, sub_obj in obj.__dict__.get("_sub_obj_cache", {}).items():
        sub_obj.lora_path, sub_obj.lora_id = lora_paths[index], lora_ids[index]


async def _acquire(
    original: Callable[..., Coroutine[Any, Any, None]], tokenizer_manager: Any, names: list[str]
) -> list[str]:
    """The registry ids of ``names``, each counted once per mention."""
    if not names:
        return []
    for attempt in range(1, _ACQUIRE_ATTEMPTS + 1):
        flat = SimpleNamespace(lora_path=names, lora_id=None)  # all that the original reads and writes
        task = asyncio.ensure_future(original(tokenizer_manager, flat))
        try:
            await asyncio.shield(task)
            assert isinstance(flat.lora_id, list) and len(flat.lora_id) == len(names), (
                f"{len(names)} members, ids {flat.lora_id}"
            )
            return flat.lora_id
        except asyncio.CancelledError:
            # The client left. Cancelling half-way could leave some members counted for ever: let it finish, then give
            # them back.
            task.add_done_callback(partial(_give_back, tokenizer_manager.lora_registry, flat))
            raise
        except ValueError as error:
            # A member may have been evicted, by another request's load, between its own load and the lookup.
            if attempt == _ACQUIRE_ATTEMPTS or "not loaded" not in str(error):
                raise
    raise AssertionError("unreachable")


_give_back_tasks: set[asyncio.Task[None]] = set()  # the event loop holds tasks weakly


def _give_back(registry: Any, flat: SimpleNamespace, acquiring: asyncio.Future[None]) -> None:
    if acquiring.cancelled() or acquiring.exception() is not None:
        return
    task = asyncio.ensure_future(registry.release(flat.lora_id))
    _give_back_tasks.add(task)
    task.add_done_callback(_give_back_tasks.discard)


async def release_members(
    original: Callable[..., Coroutine[Any, Any, None]], registry: Any, lora_id: str | list[str | None] | None
) -> None:
    """AROUND ``LoRARegistry.release``: release every member of every mix. None, from a request that failed before it
    acquired anything, releases nothing."""
    if current_settings() is None:
        return await original(registry, lora_id)
    lora_ids = lora_id if isinstance(lora_id, list) else [lora_id]
    members = [member for one in lora_ids if one for member, _ in decode_lora_id(one)]
    if members:
        await original(registry, members)


async def forget_unloaded(
    original: Callable[..., Coroutine[Any, Any, Any]], tokenizer_manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``TokenizerManager.unload_lora_adapter``: what a user unloads is gone, also if max_loaded_loras has evicted it
    before. SGLang would load it again on the next use."""
    if current_settings() is None:
        return await original(tokenizer_manager, obj, *args, **kwargs)
    obj.rid = UNLOAD_FOR_GOOD
    cache, name = tokenizer_manager.lora_ref_cache, obj.lora_name
    ref = None
    while True:
        ref = cache.pop(name, ref)
        result = await original(tokenizer_manager, obj, *args, **kwargs)
        if result.success or ref is None or name in tokenizer_manager.pending_lora_unloads:
            break
        async with tokenizer_manager.lora_update_lock:
            if name in tokenizer_manager.lora_registry.get_all_adapters():
                continue  # loaded again meanwhile, for a request that had asked before
            obj.lora_id = ref.lora_id
            result = (await tokenizer_manager.update_lora_adapter_communicator(obj))[0]
        break
    if result.success:
        cache.pop(name, None)  # such a request may have put it back
    elif ref is not None:
        cache.setdefault(name, ref)
    return result


async def count_at_once(
    original: Callable[..., Coroutine[Any, Any, Any]], registry: Any, lora_name: str | list[str | None]
) -> Any:
    """AROUND ``LoRARegistry.acquire``: look members up and count them in one step. SGLang does it in two, and an unload
    between them does not wait for the request."""
    if current_settings() is None or not isinstance(lora_name, list):
        return await original(registry, lora_name)
    async with registry._registry_lock.writer_lock:
        refs = [registry._registry.get(name) for name in lora_name if name is not None]
        if None in refs:
            missing = [name for name in lora_name if name is not None and name not in registry._registry]
            raise ValueError(f"these adapters are not loaded: {', '.join(missing)}; they were unloaded just now")
        for ref in refs:
            registry._registry.move_to_end(ref.lora_name)
            await registry._counters[ref.lora_id].increment(notify_all=False)
    lora_ids = (ref.lora_id for ref in refs)
    return [None if name is None else next(lora_ids) for name in lora_name]


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", settle_lora_path, HookType.BEFORE),
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", check_request, HookType.BEFORE),
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager._resolve_lora_path", acquire_members, HookType.AROUND),
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager.unload_lora_adapter", forget_unloaded, HookType.AROUND),
    ("sglang.srt.lora.lora_registry.LoRARegistry.acquire", count_at_once, HookType.AROUND),
    ("sglang.srt.lora.lora_registry.LoRARegistry.release", release_members, HookType.AROUND),
]
