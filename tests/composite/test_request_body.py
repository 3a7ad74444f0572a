"""A request's fields: any of them says it, together they must say the same, and the body keeps none of them."""

import pytest

from sglang_lora_tree.composite.mix import MixError
from sglang_lora_tree.composite.request_body import (
    HEALTH_CHECK,
    Naming,
    UnknownModelError,
    canonical_mixes,
    check_shapes,
    count_prompts,
    take_mixes,
)

NAMING = Naming({"math": 0, "json": 0, "org:math": 0, "llama:v2": 0}, ("llama", "path/to/llama", "default"), 8)
MIX = '{"json":0.3,"math":0.7}'


def take(body, prompt_fields=("text", "input_ids", "input_embeds"), model="strict"):
    return take_mixes(body, NAMING, prompt_fields=prompt_fields, model=model)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_path": "math:0.7,json:0.3"},
        {"lora_path": '{"math": 0.7, "json": 0.3}'},
        {"lora_path": {"math": 0.7, "json": 0.3}},
        {"lora": {"math": 0.7, "json": 0.3}},
        {"lora": [{"name": "math", "scale": 0.7}, {"id": "json", "weight": 0.3}]},
        {"lora": "math:0.7,json:0.3"},
        {"merged_adapters": {"ids": ["math", "json"], "weights": [0.7, 0.3], "merge_strategy": "linear"}},
        {"model": "llama:math:0.7,json:0.3"},
        {"model": "path/to/llama:math:0.7,json:0.3"},
        {"model": "math:0.7,json:0.3"},
        {"model": "llama", "lora": {"json": 0.3, "math": 0.7}, "lora_path": None},
        {
            "model": "llama:math:0.7,json:0.3",
            "lora_path": MIX,
            "lora": [{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}],
        },
    ],
)
def test_every_field_says_it_and_is_taken_out(fields):
    body = {"text": "x", **fields}
    assert take(body) == MIX
    assert body.keys() <= {"text", "model"}
    assert body.get("model") == fields.get("model")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("llama", None),
        ("path/to/llama", None),
        ("default", None),
        ("llama:", None),
        ("math", "math"),
        ("org:math", '{"org:math":1}'),
        ("llama:math", "math"),
        ("llama: math", "math"),
        ("llama:org:math", '{"org:math":1}'),
        ("llama:org:math:0.5", '{"org:math":0.5}'),
        ("math:0.5", '{"math":0.5}'),
        ("llama:v2", '{"llama:v2":1}'),
    ],
)
def test_what_a_model_asks_for(model, says):
    assert take({"model": model}) == says


@pytest.mark.parametrize("model", ["gpt-4", "maht", "math:x", "other:math", "math:0.5,maht:0.5"])
def test_a_model_that_is_not_served_is_unknown_unless_the_endpoint_is_lenient(model):
    with pytest.raises(UnknownModelError, match=r"does not exist.*llama"):
        take({"model": model})
    assert take({"model": model}, model="lenient") is None
    assert take({"model": model}, model="ignored") is None


@pytest.mark.parametrize("rule", ["strict", "lenient"])
def test_a_base_with_an_adapter_that_is_not_served_is_an_error_everywhere(rule):
    with pytest.raises(MixError, match=r"model 'llama:maht'.*no adapter is called 'maht'") as raised:
        take({"model": "llama:maht"}, model=rule)
    assert not isinstance(raised.value, UnknownModelError)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_path": "math", "lora": {"json": 1}},
        {"model": "math", "lora_path": "json"},
        {"model": "math", "lora": []},
        {"lora": {"math": 0.7}, "merged_adapters": {"ids": ["math"], "weights": [0.70001]}},
        {"text": ["x", "y"], "model": "math", "lora_path": ["math", None]},
    ],
)
def test_fields_that_disagree_are_an_error(fields):
    with pytest.raises(MixError, match="two forms disagree"):
        take({"text": "x", **fields})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["math", None], ["math", None]),
        (["math:0.7,json:0.3", {"math": 0.7, "json": 0.3}], [MIX, MIX]),
        ([[{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}], "json"], [MIX, "json"]),
        ([{"math": 0.7, "json": 0.3}, []], [MIX, None]),
        ([None, "math:0"], None),
        ([{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}], MIX),
        ("math", "math"),
    ],
)
def test_a_batch_may_have_one_mix_per_prompt(value, says):
    assert take({"text": ["x", "y"], "lora": value}) == says
    assert take({"input_ids": [[1], [2, 3]], "lora_path": value}) == says
    assert canonical_mixes(value, 2, NAMING) == says


@pytest.mark.parametrize("text", ["x", ["x"], ["x", "y", "z"]])
def test_a_list_must_fit_the_batch(text):
    with pytest.raises(MixError, match="lora: a list of 2 mixes for"):
        take({"text": text, "lora": ["math", "json"]})


def test_an_error_in_a_batch_names_the_prompt():
    with pytest.raises(MixError, match="lora, prompt 2: mix 'maht'"):
        take({"text": ["x", "y"], "lora": ["math", "maht"]})


@pytest.mark.parametrize("value", ["math", ["math"], {"math": 0.5}])
def test_merged_adapters_has_one_shape(value):
    with pytest.raises(MixError, match=r"merged_adapters.*want.*ids"):
        take({"text": ["x"], "merged_adapters": value})


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("text", "x", None),
        ("text", ["x"], 1),
        ("input_ids", [1, 2], None),
        ("input_ids", [[1], [2]], 2),
        ("input_ids", [], None),
        ("input_embeds", [[0.5, 1.0]], None),
        ("input_embeds", [[[0.5, 1.0]], [[0.5, 1.0]]], 2),
        ("prompt", ["x", "y"], 2),
        ("prompt", [[1, 2], [3]], 2),
        ("prompt", [1, 2], None),
        ("input", [{"text": "x"}, {"text": "y"}], 2),
    ],
)
def test_prompts_are_counted_as_sglang_counts_them(field, value, count):
    assert count_prompts({field: value}.get, (field,)) == count


@pytest.mark.parametrize("value", ["0" * 32, ["a"], 5, {}])
def test_an_internal_id_is_refused_whatever_its_type(value):
    for fields in ({}, {"lora": "math"}, {"model": "math"}):
        with pytest.raises(MixError, match="lora_id: is internal"):
            take({"text": "x", "lora_id": value, **fields})


@pytest.mark.parametrize(
    ("prompts", "fields", "says"),
    [
        (None, {"rid": ["a", "b"]}, "rid: a list for a single prompt"),
        (None, {"input_embeds": []}, "input_embeds: is empty"),
        (None, {"input_embeds": [[]]}, "input_embeds: is empty"),
        (None, {"sampling_params": [{}]}, "a list of 1 for a single prompt"),
        (2, {"sampling_params": []}, "a list of 0 for a batch of 2"),
        (2, {"return_logprob": [True]}, "return_logprob: a list of 1 for a batch of 2; give one for all, or one per prompt"),
        (None, {"top_logprobs_num": [1, 2]}, "top_logprobs_num: a list of 2 for a single prompt"),
        (2, {"sampling_params": [{}, None]}, "an object is wanted, and None is none"),
        (None, {"sampling_params": {"n": 0}}, "n = 0; give a whole number"),
        (None, {"sampling_params": {"n": None}}, "n = None; give a whole number"),
        (2, {"sampling_params": [{}, {"n": -1}]}, "n = -1; give"),
        (None, {"sampling_params": {"top_k": 2**31}}, "top_k = 2147483648; give a number of tokens"),
        (None, {"sampling_params": {"n": "1" * 500}}, "^.{,200}$"),
        (None, {"sampling_params": {"stop_regex": "("}}, r"stop_regex '\(' is no regular expression: missing"),
        (None, {"sampling_params": {"stop_regex": ["a", 5]}}, "stop_regex 5 is no regular expression"),
    ],
)
def test_fields_that_do_not_fit_the_prompts_are_named(prompts, fields, says):
    with pytest.raises(ValueError, match=says):
        check_shapes(fields.get, prompts)


@pytest.mark.parametrize(
    ("prompts", "fields"),
    [
        (None, {}),
        (None, {"rid": "a", "sampling_params": {"n": 2, "top_k": 2**31 - 1, "stop_regex": ["a+", "b"]}}),
        (2, {"rid": ["a", "b"], "sampling_params": [{"n": 1}, {"stop_regex": "x"}]}),
        (2, {"sampling_params": {}}),
        (2, {"return_logprob": [True, False], "logprob_start_len": [0, -1], "top_logprobs_num": 2}),
    ],
)
def test_fields_that_fit_pass(prompts, fields):
    check_shapes(fields.get, prompts)


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_1", ["a", "HEALTH_CHECK"]])
def test_a_request_does_not_go_for_a_health_check(rid):
    """A busy scheduler drops these unanswered."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    assert HEALTH_CHECK_RID_PREFIX == HEALTH_CHECK
    with pytest.raises(MixError, match="is the server's own; choose another"):
        take({"text": "x", "rid": rid})
    assert take({"text": "x", "rid": "math"}) is None
