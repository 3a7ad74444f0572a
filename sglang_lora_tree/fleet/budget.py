"""Rank budgets: how many directions each module keeps (LoRAForge, arXiv 2611.01256, section 5).

Uniform (LoRAForge-U): u_m = max(floor, r_m * fraction, rounded down); P_U = sum u_m (d_in + d_out) parameters.
Spectral (LoRAForge-S): the same P_U, spent where a parameter keeps most energy: eta_mj = sigma_mj^2 / (d_in + d_out).
Energy is the squared Frobenius norm of dW; what is lost of it is the square of the relative weight error.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

LARGEST_SEARCH = 1_000_000
"""Combinations tried around the greedy answer: enough to be exact for up to four different costs."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """One module: energy (r,) float64, sigma_mj^2 in descending order; cost: d_in + d_out, parameters per direction."""

    energy: np.ndarray
    cost: int

    @property
    def rank(self) -> int:
        return len(self.energy)


class BudgetError(ValueError):
    """A budget that cannot be kept; says why and what to do."""


def parse_fraction(text: str) -> Fraction:
    """A budget as the user writes it: 1/12, 0.25, 25%. Raises BudgetError unless it is above 0 and at most 1."""
    try:
        fraction = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        raise BudgetError(f"budget {text!r} is no number: write a share of the parameters, such as 1/12 or 0.25") from None
    if not 0 < fraction <= 1:
        raise BudgetError(f"budget {text} is not above 0 and at most 1: it is a share of the parameters, such as 1/12")
    return fraction


def uniform_ranks(modules: Sequence[Spectrum], fraction: Fraction, floor: int = 1) -> list[int]:
    """u_m = max(floor, r_m * fraction rounded down), at most r_m."""
    return [min(module.rank, max(floor, math.floor(module.rank * fraction))) for module in modules]


def count_parameters(modules: Sequence[Spectrum], ranks: Sequence[int]) -> int:
    """Parameters of all modules at these ranks."""
    return sum(rank * module.cost for module, rank in zip(modules, ranks, strict=True))


def kept_energy(modules: Sequence[Spectrum], ranks: Sequence[int]) -> float:
    """Energy of all modules at these ranks."""
    return math.fsum(float(module.energy[:rank].sum()) for module, rank in zip(modules, ranks, strict=True))


def total_energy(modules: Sequence[Spectrum]) -> float:
    return kept_energy(modules, [module.rank for module in modules])


def spectral_ranks(modules: Sequence[Spectrum], budget: int, floor: int = 1) -> list[int]:
    """The ranks of at least `floor` (or r_m) that keep most energy in at most `budget` parameters.

    Greedy by energy per parameter, from a heap with the next direction of each module. That is the optimum up to where a
    direction no longer fits; the few that remain are settled by search (`_settle`), so the answer is exact for models of
    up to four different d_in + d_out. Directions without energy are not kept. Raises BudgetError if the floors do not fit.
    """
    floors = [min(floor, module.rank) for module in modules]
    left = budget - count_parameters(modules, floors)
    if left < 0:
        raise BudgetError(
            f"a budget of {budget} parameters is less than the {budget - left} that rank {floor} takes in every module: "
            "raise the budget or lower the floor"
        )
    taken = _spend(modules, floors, left)
    return _settle(modules, floors, taken, left)


def ranks_within_loss(modules: Sequence[Spectrum], ranks: Sequence[int], max_loss: float) -> list[int]:
    """The given ranks, raised by the best directions per parameter until at most this share of the energy is lost."""
    total = total_energy(modules)
    kept = list(ranks)
    missing = (1 - max_loss) * total - kept_energy(modules, kept)
    # Sums of floats: a loss of exactly 0 must not ask for more than all there is.
    missing -= 1e-12 * total
    heap = _heads(modules, kept)
    while missing > 0 and heap:
        _, index = heapq.heappop(heap)
        missing -= float(modules[index].energy[kept[index]])
        kept[index] += 1
        _push(heap, modules, kept, index)
    return kept


def _spend(modules: Sequence[Spectrum], floors: Sequence[int], left: int) -> list[int]:
    """Ranks after the greedy's first direction that does not fit: the linear relaxation's answer, rounded down."""
    ranks = list(floors)
    heap = _heads(modules, ranks)
    while heap:
        _, index = heapq.heappop(heap)
        if modules[index].cost > left:
            break
        left -= modules[index].cost
        ranks[index] += 1
        _push(heap, modules, ranks, index)
    return ranks


def _heads(modules: Sequence[Spectrum], ranks: Sequence[int]) -> list[tuple[float, int]]:
    heap: list[tuple[float, int]] = []
    for index in range(len(modules)):
        _push(heap, modules, ranks, index)
    return heap


def _push(heap: list[tuple[float, int]], modules: Sequence[Spectrum], ranks: Sequence[int], index: int) -> None:
    module, rank = modules[index], ranks[index]
    if rank < module.rank and module.energy[rank] > 0:
        heapq.heappush(heap, (-float(module.energy[rank]) / module.cost, index))


def _settle(modules: Sequence[Spectrum], floors: Sequence[int], taken: Sequence[int], left: int) -> list[int]:
    """The best ranks near the greedy's.

    Directions of equal cost are taken in order of energy, so only the number taken of each cost is open. It differs from
    the greedy's by at most 2 D + 1, D the largest cost over the costs' common divisor (Eisenbrand and Weismantel 2018,
    arXiv 1707.00481, for one constraint); the cheapest cost takes what remains.
    """
    costs = sorted({module.cost for module in modules})
    pools = [_pool(modules, floors, cost) for cost in costs]
    sums = [np.concatenate([[0.0], np.cumsum([energy for energy, _ in pool])]) for pool in pools]
    start = [
        sum(rank - floor for module, rank, floor in zip(modules, taken, floors, strict=True) if module.cost == cost)
        for cost in costs
    ]
    reach = 2 * costs[-1] // math.gcd(*costs) + 1
    while len(costs) > 1 and (2 * reach + 1) ** (len(costs) - 1) > LARGEST_SEARCH:
        reach -= 1
    windows = [
        np.arange(max(0, number - reach), min(len(pool), number + reach) + 1)
        for number, pool in zip(start[1:], pools[1:], strict=True)
    ]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*windows, indexing="ij")]) if windows else np.zeros((0, 1), int)
    rest = left - np.array(costs[1:], dtype=np.int64) @ grid
    grid, rest = grid[:, rest >= 0], rest[rest >= 0]
    cheapest = np.minimum(rest // costs[0], len(pools[0]))
    energy = sums[0][cheapest] + sum((sums[i + 1][grid[i]] for i in range(len(grid))), np.zeros(len(rest)))
    best = int(energy.argmax())
    numbers = [int(cheapest[best]), *map(int, grid[:, best])]
    ranks = list(floors)
    for index in itertools.chain.from_iterable(
        (index for _, index in pool[:number]) for pool, number in zip(pools, numbers, strict=True)
    ):
        ranks[index] += 1
    return ranks


def _pool(modules: Sequence[Spectrum], floors: Sequence[int], cost: int) -> list[tuple[float, int]]:
    """(energy, module index) of the directions of one cost above the floors, largest energy first."""
    pool = [
        (float(energy), index)
        for index, (module, floor) in enumerate(zip(modules, floors, strict=True))
        if module.cost == cost
        for energy in module.energy[floor:]
        if energy > 0
    ]
    return sorted(pool, key=lambda entry: -entry[0])
