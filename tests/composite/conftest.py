"""SGLang's API process without its scheduler, with our hooks applied for one test.

Real: the registry, the request path of the tokenizer manager, the FastAPI app. Stubbed: tokenizing, the scheduler.
"""

import pkgutil
from types import SimpleNamespace

import pytest

MAX_LOADED = 3


def apply_hooks(monkeypatch, hooks):
    """What HookRegistry.apply_hooks does, undone after the test."""
    from sglang.srt.plugins.hook_registry import _wrap_fn

    for target, hook, hook_type in hooks:
        owner, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        monkeypatch.setattr(owner, name, _wrap_fn(getattr(owner, name), hook, hook_type))


@pytest.fixture(scope="session")
def tokenizer_manager_class():
    """A TokenizerManager that knows adapters a, b, c (MAX_LOADED fit; d was evicted) and answers without a model."""
    import asyncio

    from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.aio_rwlock import RWLock

    class StubTokenizerManager(TokenizerManager):
        def __init__(self, names=("math", "json", "org:math"), evicted=("old",)):
            refs = {name: LoRARef(lora_name=name, lora_path=f"/adapters/{name}") for name in (*names, *evicted)}
            self.lora_registry = LoRARegistry([refs[name] for name in names])
            self.lora_ref_cache = refs
            self.enable_lora = True
            self.served_model_name, self.model_path = "llama", "path/to/llama"
            self.server_args = None
            self.model_config = SimpleNamespace(
                context_len=1000,
                is_multimodal=False,
                get_default_sampling_params=dict,
                hf_config=SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"]),
            )
            self.tokenizer = None
            self.is_pause, self.is_pause_cond = False, asyncio.Condition()
            self.model_update_lock = RWLock()
            self.request_logger = SimpleNamespace(log_requests=False, log_received_request=lambda *_: None)
            self.rid_to_state, self._lora_release_tasks, self.encoder_dispatch_ready = {}, set(), {}
            self.elastic_worker_count = 1
            self.sent, self.loads, self.fail, self.hang = [], [], set(), False

        # -- what tests look at

        def name_of(self, lora_id):
            """The members of a lora_id by name."""
            from sglang_lora_tree.composite.lora_id import decode_lora_id

            names = {ref.lora_id: name for name, ref in self.lora_ref_cache.items()}
            return {names[member]: weight for member, weight in decode_lora_id(lora_id)} if lora_id else {}

        @property
        def mixes(self):
            """Per request sent to the scheduler, the members and weights it carries."""
            return [self.name_of(lora_id) for lora_id in self.sent]

        async def counts(self):
            """Running requests per adapter, after everything that is under way has ended."""
            for _ in range(5):
                await asyncio.sleep(0)
            await asyncio.gather(*self._lora_release_tasks)
            counters = self.lora_registry._counters
            return {name: counters[ref.lora_id].value() for name, ref in self.lora_registry.get_all_adapters().items()}

        # -- stubs: no model, no scheduler, no loop of answers

        def config_value(self, name):
            return None

        def auto_create_handle_loop(self):
            pass

        def _set_default_priority(self, obj):
            pass

        def _should_use_batch_tokenization(self, batch_size, obj):
            return False

        def create_abort_task(self, obj):
            return None

        def abort_request(self, rid="", abort_all=False):
            pass

        def _init_req_state(self, obj, request=None):
            for one in [obj[i] for i in range(len(obj.rid))] if isinstance(obj.rid, list) else [obj]:
                times = SimpleNamespace(set_finished_time=lambda: None)
                state = SimpleNamespace(obj=one, lora_released=False, dispatched=False, time_stats=times)
                self.rid_to_state[one.rid] = state

        async def _tokenize_one_request(self, obj):
            await asyncio.sleep(0)  # let other requests run in between
            if obj.text in self.fail:
                raise ValueError("the prompt is too long")
            return SimpleNamespace(rid=obj.rid, lora_id=obj.lora_id, sampling_params=SimpleNamespace(max_new_tokens=1))

        async def _send_one_request(self, tokenized):
            self.rid_to_state[tokenized.rid].dispatched = True
            if tokenized.sampling_params.max_new_tokens:
                self.sent.append(tokenized.lora_id)

        async def _stream_one_response(self, obj, state, request=None):
            while self.hang:
                await asyncio.sleep(0.01)
            meta = {
                "id": obj.rid,
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "cached_tokens": 0,
                "weight_version": "0",
            }
            text = "/".join(f"{name}={weight:g}" for name, weight in self.name_of(obj.lora_id).items()) or "base"
            finish = {"type": "stop", "matched": None}
            output = {
                "text": text,
                "meta_info": {**meta, "finish_reason": finish},
                "output_ids": [1],
                "embedding": [0.5],
            }
            del self.rid_to_state[obj.rid]
            self._release_lora_once(state)
            yield output

        async def load_lora_adapter(self, request: LoadLoRAAdapterReqInput, _=None):
            """As TokenizerControlMixin: register, then evict the least recently used adapters over the limit."""
            self.loads.append(request.lora_name)
            ref = LoRARef(lora_name=request.lora_name, lora_path=request.lora_path)
            await self.lora_registry.register(ref)
            self.lora_ref_cache[request.lora_name] = ref
            while self.lora_registry.num_registered_loras > MAX_LOADED:
                victim = await self.lora_registry.lru_lora_name(exclude_pinned=True)
                await self.lora_registry.wait_for_unload(await self.lora_registry.unregister(victim))
            return SimpleNamespace(success=True, error_message="")

    return StubTokenizerManager


@pytest.fixture
def tokenizer_manager(monkeypatch, tokenizer_manager_class):
    from sglang.srt.runtime_context import get_context

    from sglang_lora_tree.composite import request_hooks
    from sglang_lora_tree.config import ENVIRONMENT_VARIABLE

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    apply_hooks(monkeypatch, request_hooks.HOOKS)
    with get_context().override_server_args(max_loaded_loras=MAX_LOADED, enable_lora=True):
        yield tokenizer_manager_class()
