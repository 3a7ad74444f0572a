"""A whole fleet: budgets as asked for, resumable, nothing overwritten, and slots that shrink with the ranks."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from fractions import Fraction

import pytest
import torch

from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.fleet import compress as compress_module
from sglang_lora_tree.fleet.budget import count_parameters, uniform_ranks
from sglang_lora_tree.fleet.compress import CompressionError, Settings, compress, plan_ranks, survey_fleet
from sglang_lora_tree.fleet.report import energy_share
from sglang_lora_tree.radix.layout import Outline, Packer, PoolShape

from .conftest import BASE, deltas

QUARTER = Settings(Fraction(1, 4))


@pytest.fixture
def fleet(save):
    return [save("flat", seed=1, decay=0.95, rank=16), save("steep", seed=2, decay=0.4, rank=16), save("small", seed=3)]


@pytest.mark.parametrize("policy", ["uniform", "spectral"])
@pytest.mark.parametrize("scope", ["adapter", "fleet"])
def test_budgets_are_kept_to_the_parameter(fleet, tmp_path, policy, scope):
    settings = dataclasses.replace(QUARTER, policy=policy, scope=scope)
    outcomes = compress(fleet, tmp_path / "out", settings, BASE)
    budget = {
        outcome.survey.name: count_parameters(
            outcome.survey.spectra, uniform_ranks(outcome.survey.spectra, Fraction(1, 4))
        )
        for outcome in outcomes
    }
    spent = {}
    for outcome in outcomes:
        written = load_adapter(tmp_path / "out" / outcome.survey.name, BASE)
        spent[written.name] = sum(module.a.numel() + module.b.numel() for module in written.modules.values())
    assert sum(spent.values()) <= sum(budget.values())
    if scope == "adapter" or policy == "uniform":
        assert all(spent[name] <= budget[name] for name in budget)
    else:
        assert spent["flat"] > budget["flat"], "nothing moved between adapters"


def test_an_adapter_of_large_weights_does_not_starve_the_fleet(save):
    settings = dataclasses.replace(QUARTER, scope="fleet")
    fleet = [save("a", seed=1), save("b", seed=2, decay=0.8), save("b_loud", seed=2, decay=0.8, lora_alpha=12000)]
    quiet, loud = (plan_ranks(survey_fleet([fleet[0], other]), settings) for other in fleet[1:])
    assert quiet == loud


def test_the_error_is_that_of_what_was_written_and_matches_the_energy(fleet, tmp_path):
    for outcome in compress(fleet, tmp_path / "out", QUARTER, BASE):
        original = deltas(load_adapter(outcome.survey.folder, BASE))
        written = deltas(load_adapter(tmp_path / "out" / outcome.survey.name, BASE))
        lost = sum(float((original[place] - written[place]).square().sum()) for place in original)
        total = sum(float(delta.square().sum()) for delta in original.values())
        assert outcome.error == pytest.approx((lost / total) ** 0.5, rel=1e-5)
        assert outcome.error**2 == pytest.approx(1 - energy_share(outcome.survey, outcome.ranks), rel=1e-4)


@pytest.mark.parametrize("policy", ["uniform", "spectral"])
def test_slots_shrink_with_the_budget(save, tmp_path, policy):
    """In the server's own layout a compressed adapter takes at most 1.1 times its share of the pool."""
    folder = save("big", rank=48, decay=0.9)
    compress([folder], tmp_path / "out", Settings(Fraction(1, 12), policy), BASE)
    packer = Packer(BASE, PoolShape(BASE.num_layers, BASE.kv_width, page_size=1))
    slots = {}
    for where in (folder, tmp_path / "out" / "big"):
        adapter = load_adapter(where, BASE)
        slots[where] = packer.plan(Outline.of(adapter, BASE.num_layers)).num_slots
        assert len(packer.pack(adapter, torch.float32)) == slots[where] * packer.pool.num_planes
    assert slots[tmp_path / "out" / "big"] <= 1.1 * slots[folder] / 12


def test_report_counts_slots_as_the_server_does(fleet):
    packer = Packer(BASE, PoolShape(BASE.num_layers, BASE.kv_width, page_size=1))
    for folder, survey in zip(fleet, survey_fleet(fleet, BASE), strict=True):
        planned = packer.plan(Outline.of(load_adapter(folder, BASE), BASE.num_layers)).num_slots
        assert survey.slots(survey.ranks, BASE) == planned


def test_keep_and_largest_loss(fleet, tmp_path):
    settings = dataclasses.replace(QUARTER, keep=("small",), max_energy_loss=0.05)
    outcomes = {outcome.survey.name: outcome for outcome in compress(fleet, tmp_path / "out", settings, BASE)}
    assert load_adapter(tmp_path / "out" / "small").digest == load_adapter(fleet[2]).digest
    assert outcomes["small"].error == 0
    assert all(outcome.error**2 <= 0.05 + 1e-6 for outcome in outcomes.values())
    flat, steep = outcomes["flat"], outcomes["steep"]
    assert sum(flat.ranks) > 21 * 4, "the flat one needs more than its budget for this"
    assert plan_ranks([steep.survey], QUARTER) == [steep.ranks], "the steep one does not"


def test_the_dtype_is_the_original_s_or_as_asked(save, tmp_path):
    half = save("half", dtype=torch.bfloat16)
    compress([half], tmp_path / "same", QUARTER)
    compress([half], tmp_path / "wide", dataclasses.replace(QUARTER, dtype="float32"))
    assert load_adapter(tmp_path / "same" / "half").dtypes == (torch.bfloat16,)
    assert load_adapter(tmp_path / "wide" / "half").dtypes == (torch.float32,)


def test_goes_on_where_it_was_cut_short(fleet, tmp_path, monkeypatch):
    """Cut at every write; what is finished is not done again, and the end is as without a cut."""
    compress(fleet, tmp_path / "whole", QUARTER, BASE)
    factorised, written = [], []
    factorise, write_adapter = compress_module.factorise, compress_module.write_adapter

    def counted(adapter, device):
        factorised.append(adapter.name)
        return factorise(adapter, device)

    def cut(source, target, adapter, *, padded):
        write_adapter(source, target, adapter, padded=padded)
        written.append(target.name)
        if len(written) <= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(compress_module, "factorise", counted)
    monkeypatch.setattr(compress_module, "write_adapter", cut)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compress(fleet, tmp_path / "out", QUARTER, BASE)
    outcomes = compress(fleet, tmp_path / "out", QUARTER, BASE)
    assert factorised == ["flat", "steep", "small"]
    assert [outcome.survey.name for outcome in outcomes] == factorised
    for name in factorised:
        assert load_adapter(tmp_path / "out" / name).digest == load_adapter(tmp_path / "whole" / name).digest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["flat", "small", "steep"]


@pytest.mark.parametrize("dry", [False, True])
def test_one_adapter_is_in_memory_at_a_time(fleet, tmp_path, monkeypatch, dry):
    """When an adapter is loaded, no tensor of one before it is alive."""
    loaded: list[weakref.ref[torch.Tensor]] = []
    load = compress_module.load_adapter

    def watched(*arguments):
        alive = [tensor for tensor in loaded if tensor() is not None]
        assert not alive, f"{len(alive)} tensors of earlier adapters are alive"
        adapter = load(*arguments)
        loaded.extend(weakref.ref(half) for module in adapter.modules.values() for half in (module.a, module.b))
        return adapter

    monkeypatch.setattr(compress_module, "load_adapter", watched)
    gc.disable()  # freed at once, and not whenever the collector comes by
    try:
        if dry:
            survey_fleet(fleet, BASE)
        else:
            compress(fleet, tmp_path / "out", QUARTER, BASE)
    finally:
        gc.enable()
    assert len(loaded) == 3 * 21 * 2 * (1 if dry else 2), "not every adapter was loaded, once or twice"


def test_another_run_s_start_or_result_is_not_overwritten(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(compress_module, "write_adapter", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compress(fleet, tmp_path / "out", QUARTER)
    monkeypatch.undo()
    with pytest.raises(CompressionError, match="start of a run with other adapters or settings"):
        compress(fleet, tmp_path / "out", dataclasses.replace(QUARTER, policy="uniform"))
    compress(fleet, tmp_path / "out", QUARTER)
    with pytest.raises(CompressionError, match="not empty: choose another --out"):
        compress(fleet, tmp_path / "out", QUARTER)


def test_an_adapter_that_changed_meanwhile_is_refused(fleet, tmp_path, monkeypatch, save):
    monkeypatch.setattr(compress_module, "plan_ranks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compress(fleet, tmp_path / "out", QUARTER)
    monkeypatch.undo()
    other = save("other", seed=9)
    (other / "adapter_model.safetensors").replace(fleet[2] / "adapter_model.safetensors")
    with pytest.raises(CompressionError, match="small has changed since"):
        compress(fleet, tmp_path / "out", QUARTER)


def test_names_must_differ(fleet, tmp_path):
    twin = tmp_path / "elsewhere" / "flat"
    twin.mkdir(parents=True)
    with pytest.raises(CompressionError, match="same name: rename one"):
        compress([fleet[0], twin], tmp_path / "out", QUARTER)
    with pytest.raises(CompressionError, match="among the adapters: missing"):
        compress(fleet, tmp_path / "out", dataclasses.replace(QUARTER, keep=("missing",)))
