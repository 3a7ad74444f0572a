"""From a request object to acquired members: every form, every way to fail, and nothing stays acquired."""

import asyncio

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.runtime_context import get_context

from sglang_lora_tree.composite.mix import MixError
from sglang_lora_tree.composite.request_hooks import check_request

IDLE = {"math": 0, "json": 0, "org:math": 0}


async def answer(manager, **fields):
    request = GenerateReqInput(**{"text": "x", "sampling_params": {}, **fields})
    outputs = [output async for output in manager.generate_request(request)]
    return outputs[0] if len(outputs) == 1 else outputs


def run(manager, **fields):
    """The answer's text (or texts), and the counts of running requests afterwards."""

    async def body():
        output = await answer(manager, **fields)
        return [one["text"] for one in output] if isinstance(output, list) else output["text"], await manager.counts()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("lora_path", "says"),
    [
        (None, "base"),
        ("math", "math=1"),
        ("org:math", "org:math=1"),
        ("org:math:0.5", "org:math=0.5"),
        ("math:0.5,json:0.25", "json=0.25/math=0.5"),
        ({"math": 0.5, "json": 0.25}, "json=0.25/math=0.5"),
        ([{"name": "math", "scale": 0.5}, {"name": "json", "scale": 0.25}], "json=0.25/math=0.5"),
        (["math"], "math=1"),
        ({"math": 0}, "base"),
        ({}, "base"),
        ("", "base"),
    ],
)
def test_the_engine_takes_every_form(tokenizer_manager, lora_path, says):
    text, counts = run(tokenizer_manager, lora_path=lora_path)
    assert sorted(text.split("/")) == sorted(says.split("/"))
    assert counts == IDLE


def test_one_adapter_at_weight_one_keeps_its_registry_id(tokenizer_manager):
    run(tokenizer_manager, lora_path={"math": 1.0})
    assert tokenizer_manager.sent == [tokenizer_manager.lora_ref_cache["math"].lora_id]


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_with_a_mix_per_prompt_and_samples(tokenizer_manager, n):
    lora_path = ["math:0.5,json:0.5", None, {"json": 1}, "math:0"]
    run_text, counts = run(tokenizer_manager, text=["p", "q", "r", "s"], lora_path=lora_path, sampling_params={"n": n})
    expected = [{"json": 0.5, "math": 0.5}, {}, {"json": 1.0}, {}]
    assert tokenizer_manager.mixes == [mix for mix in expected for _ in range(n)]
    assert len(run_text) == 4 * n
    assert counts == IDLE


def test_one_mix_for_a_whole_batch_and_for_samples_of_one_prompt(tokenizer_manager):
    run(tokenizer_manager, text=["p", "q"], lora_path={"math": 0.5})
    run(tokenizer_manager, text="p", lora_path={"math": 0.5}, sampling_params={"n": 2})
    assert tokenizer_manager.mixes == [{"math": 0.5}] * 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [-1]}, "there is no token -1; this model has tokens 0 to 99"),
        ({"input_ids": [1, 100, 2]}, "there is no token 100"),
        ({"input_ids": [5], "top_logprobs_num": 101}, "top_logprobs_num 101: this model has 100 tokens"),
        ({"input_ids": [5], "positional_embed_overrides": [[1, [1.0]]]}, "positional_embed_overrides: "),
        ({"input_ids": [5], "top_logprobs_num": [1, 2]}, "top_logprobs_num = "),
        ({"input_ids": [5], "logprob_start_len": -2}, "logprob_start_len = -2; give a place in the prompt, or -1 for its end"),
        ({"input_ids": [5], "logprob_start_len": [0, 1]}, "logprob_start_len = "),
        ({"input_ids": [5], "sampling_params": {"repetition_penalty": 1e-36}}, "repetition_penalty = 1e-36; give 0.001 to 2"),
        ({"input_ids": [5], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [100]}}, "stop_token_ids 100 with min"),
        ({"input_ids": [5], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [-1]}}, "stop_token_ids -1 with min"),
        ({"input_ids": [5], "token_indices_to_pool": [1]}, "token_indices_to_pool .setwise scores.: "),
        ({"input_ids": [5], "token_indices_to_pool": [0]}, "token_indices_to_pool .setwise scores.: "),
        ({"input_ids": [5], "custom_labels": {"a": "b"}}, "custom_labels: 'a' is not among"),
        ({"input_ids": [5], "session_params": {"id": []}}, r"session_params: id = \[\] is no str"),
        ({"input_ids": [5], "session_params": {"id": "1", "rid": []}}, r"session_params: rid = \[\] is no str"),
        ({"input_ids": [5], "session_params": {"id": "1", "offset": "x"}}, "session_params: offset = 'x' is no int"),
        ({"input_ids": [5], "session_params": {"id": "1", "of": 1}}, "session_params: there is no 'of'; it has id, rid"),
        ({"input_ids": [5], "session_params": "1"}, "session_params: an object is wanted"),
    ],
)
def test_a_request_that_would_stop_the_scheduler_is_refused(tokenizer_manager, fields, says):
    """SGLang's scheduler dies of each of them, on the CPU at least."""
    tokenizer_manager.model_config.vocab_size = 100
    request = GenerateReqInput(**{"sampling_params": {}, **fields})
    with get_context().override_server_args(enable_metrics=True), pytest.raises(ValueError, match=says):
        tokenizer_manager._validate_one_request(request, request.input_ids)


def test_a_turn_of_a_session_may_add_no_token(tokenizer_manager):
    tokenizer_manager.model_config.vocab_size = 100
    check_request(tokenizer_manager, GenerateReqInput(input_ids=[], session_params={"id": "1"}), [])
    check_request(tokenizer_manager, GenerateReqInput(input_ids=[0, 99]), [0, 99])


def test_embeddings_take_mixes_too(tokenizer_manager):
    async def body():
        request = EmbeddingReqInput(text=["p", "q"], lora_path=[{"math": 0.5}, None])
        await tokenizer_manager.generate_request(request).__anext__()
        return await tokenizer_manager.counts()

    assert asyncio.run(body()) == IDLE
    assert tokenizer_manager.mixes == [{"math": 0.5}, {}]


@pytest.mark.parametrize(
    ("lora_path", "says"),
    [
        ("maht", "no adapter is called 'maht'; known are 'json', 'math', 'old', 'org:math'"),
        ({"math": 0.5, "maht": 0.5}, "member 2"),
        ({"math": float("nan")}, "NaN"),
        (["math", "json"], "a list of 2 mixes for a single prompt"),
        (5, "a mix is a name"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_acquired(tokenizer_manager, lora_path, says):
    with pytest.raises(MixError, match=says):
        run(tokenizer_manager, lora_path=lora_path)
    assert asyncio.run(tokenizer_manager.counts()) == IDLE
    assert tokenizer_manager.sent == []


def test_an_internal_id_is_refused(tokenizer_manager):
    with pytest.raises(MixError, match="lora_id: is internal"):
        run(tokenizer_manager, lora_id=tokenizer_manager.lora_ref_cache["math"].lora_id)
    assert tokenizer_manager.sent == []


def test_the_setting_limits_the_members_of_a_mix(tokenizer_manager, monkeypatch):
    monkeypatch.setenv("SGLANG_LORA_TREE", '{"max_members": 2}')
    with pytest.raises(MixError, match="3 adapters, but at most 2 can be mixed"):
        run(tokenizer_manager, lora_path={"math": 1, "json": 1, "org:math": 1})


def test_more_members_than_may_be_loaded_at_once(tokenizer_manager):
    with pytest.raises(ValueError, match="4 unique loras requested but max loaded loras is 3"):
        run(tokenizer_manager, lora_path={"math": 1, "json": 1, "org:math": 1, "old": 1})
    assert asyncio.run(tokenizer_manager.counts()) == IDLE


def test_the_limit_counts_adapters_and_not_mixes(tokenizer_manager):
    weights = [0.1, 0.2, 0.3, 0.4, 0.5]
    run(tokenizer_manager, text=["p"] * 5, lora_path=[{"math": weight} for weight in weights])
    assert len(set(tokenizer_manager.sent)) == 5


def test_an_evicted_member_is_loaded_again(tokenizer_manager):
    text, counts = run(tokenizer_manager, lora_path={"old": 0.5, "json": 0.5})
    assert sorted(text.split("/")) == ["json=0.5", "old=0.5"]
    assert tokenizer_manager.loads == ["old"]
    assert counts == {"json": 0, "org:math": 0, "old": 0}  # "math" was the least recently used


def test_a_member_that_vanishes_between_load_and_lookup_is_loaded_once_more(tokenizer_manager):
    manager, load = tokenizer_manager, type(tokenizer_manager).load_lora_adapter

    async def load_and_lose(request, _=None):
        result = await load(manager, request)
        if len(manager.loads) == 1:
            await manager.lora_registry.unregister("old")
        return result

    manager.load_lora_adapter = load_and_lose
    text, _ = run(manager, lora_path={"old": 0.5})
    assert (text, manager.loads) == ("old=0.5", ["old", "old"])


def test_a_request_that_fails_after_acquiring_gives_its_members_back(tokenizer_manager):
    tokenizer_manager.fail.add("bad")
    for texts in (["bad"], ["good", "bad"]):
        for n in (1, 2):
            with pytest.raises(ValueError, match="too long"):
                run(
                    tokenizer_manager,
                    text=texts,
                    lora_path=[{"math": 0.5, "json": 1}] * len(texts),
                    sampling_params={"n": n},
                )
    # Only what reached the scheduler is still held: the scheduler's answer to the abort releases it.
    counts = asyncio.run(tokenizer_manager.counts())
    dispatched = sum(state.dispatched for state in tokenizer_manager.rid_to_state.values())
    assert counts == {"math": dispatched, "json": dispatched, "org:math": 0}


def test_a_client_that_leaves_while_members_are_acquired(tokenizer_manager):
    async def body():
        held = asyncio.Event()
        load = type(tokenizer_manager).load_lora_adapter

        async def slow_load(request, _=None):
            held.set()
            await asyncio.sleep(0.05)
            return await load(tokenizer_manager, request)

        tokenizer_manager.load_lora_adapter = slow_load
        task = asyncio.ensure_future(answer(tokenizer_manager, lora_path={"old": 0.5, "json": 0.5}))
        await held.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        return await tokenizer_manager.counts()

    assert asyncio.run(body()) == {"json": 0, "org:math": 0, "old": 0}
    assert tokenizer_manager.sent == [] and tokenizer_manager.rid_to_state == {}


def test_unload_waits_for_every_mix_that_holds_the_adapter(tokenizer_manager):
    async def body():
        tokenizer_manager.hang = True
        running = asyncio.ensure_future(answer(tokenizer_manager, lora_path={"math": 0.5, "json": 0.5}))
        await asyncio.sleep(0.02)
        registry = tokenizer_manager.lora_registry
        unloading = asyncio.ensure_future(registry.wait_for_unload(await registry.unregister("json")))
        await asyncio.sleep(0.02)
        assert not unloading.done()
        tokenizer_manager.hang = False
        await running
        await asyncio.wait_for(unloading, 1)

    asyncio.run(body())


@pytest.mark.parametrize("steps", range(8))
def test_an_unload_never_comes_between_lookup_and_count(tokenizer_manager, steps):
    """However far an acquisition has come when the unload begins: it fails as a whole, or is waited for."""

    async def body():
        registry = tokenizer_manager.lora_registry
        counters = {name: registry._counters[ref.lora_id] for name, ref in registry.get_all_adapters().items()}

        async def unload():
            await registry.wait_for_unload(await registry.unregister("json"))

        acquiring = asyncio.ensure_future(registry.acquire(["json", "math"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        unloading = asyncio.ensure_future(unload())
        await asyncio.wait([acquiring], timeout=1)
        await asyncio.sleep(0.01)
        if acquiring.exception() is not None:
            assert "not loaded: json" in str(acquiring.exception()) and unloading.done()
            assert {name: counter.value() for name, counter in counters.items()} == IDLE
        else:
            assert not unloading.done(), "unloaded beneath a request that counts on it"
            await registry.release(acquiring.result())
            await asyncio.wait_for(unloading, 1)

    asyncio.run(body())


@pytest.mark.parametrize("came_back", [False, True])
@pytest.mark.parametrize("evicted", [False, True])
def test_an_unload_holds_whatever_happens_while_it_waits_for_its_turn(tokenizer_manager, came_back, evicted):
    """max_loaded_loras may evict the adapter meanwhile, or a request that had asked before may load it again."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

    told = []

    async def update(obj):
        told.append(obj.lora_id)
        return [LoRAUpdateOutput(success=True, error_message="", loaded_adapters={})]

    async def body():
        registry = tokenizer_manager.lora_registry
        tokenizer_manager.lora_update_lock = asyncio.Lock()
        tokenizer_manager.pending_lora_unloads = {}
        tokenizer_manager.update_lora_adapter_communicator = update
        await tokenizer_manager.lora_update_lock.acquire()
        name = "old" if not evicted else "json"
        first = tokenizer_manager.lora_ref_cache[name]
        unloading = asyncio.ensure_future(tokenizer_manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
        await asyncio.sleep(0.01)
        if evicted:
            await registry.unregister(name)
        ref = LoRARef(lora_name=name, lora_path="x")
        if came_back:
            await registry.register(ref)
            tokenizer_manager.lora_ref_cache[name] = ref
        tokenizer_manager.lora_update_lock.release()
        assert (await asyncio.wait_for(unloading, 1)).success
        assert told == [ref.lora_id if came_back else first.lora_id]
        assert name not in registry.get_all_adapters() and name not in tokenizer_manager.lora_ref_cache

    asyncio.run(body())


@pytest.mark.parametrize("name", ["json", "old"])
@pytest.mark.parametrize("success", [True, False])
def test_what_a_user_unloads_is_not_loaded_again_on_its_next_use(tokenizer_manager, success, name):
    """Also what max_loaded_loras had evicted: the scheduler is told that it is for good this time."""
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

    from sglang_lora_tree.composite.request_hooks import UNLOAD_FOR_GOOD

    told = []

    async def update(obj):
        told.append((obj.rid, obj.lora_id))
        return [LoRAUpdateOutput(success=success, error_message="" if success else "busy", loaded_adapters={})]

    async def body():
        tokenizer_manager.lora_update_lock = asyncio.Lock()
        tokenizer_manager.pending_lora_unloads = {}
        tokenizer_manager.update_lora_adapter_communicator = update
        return await tokenizer_manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))

    lora_id = tokenizer_manager.lora_ref_cache[name].lora_id
    assert asyncio.run(body()).success == success
    assert told == [(UNLOAD_FOR_GOOD, lora_id)]
    assert (name in tokenizer_manager.lora_ref_cache) != success
    if success:
        with pytest.raises(ValueError, match=f"no adapter is called '{name}'"):
            run(tokenizer_manager, lora_path=name)


def test_without_the_flag_sglang_is_as_it_was(tokenizer_manager, monkeypatch):
    monkeypatch.delenv("SGLANG_LORA_TREE")
    assert run(tokenizer_manager, lora_path="math") == ("math=1", IDLE)
    assert run(tokenizer_manager, text=["p", "q"], lora_path=["math", None]) == (["math=1", "base"], IDLE)
    with pytest.raises(ValueError, match=r"never been loaded: math:0\.5"):
        run(tokenizer_manager, lora_path="math:0.5")


def test_hooks_applied_twice_change_nothing(tokenizer_manager, monkeypatch):
    from sglang_lora_tree.composite import request_hooks

    from .conftest import apply_hooks

    apply_hooks(monkeypatch, request_hooks.HOOKS)
    _, counts = run(tokenizer_manager, text=["p", "q"], lora_path=["math:0.5,json:0.25", None])
    assert (tokenizer_manager.mixes, counts) == ([{"json": 0.25, "math": 0.5}, {}], IDLE)
