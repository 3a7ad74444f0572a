"""SGLang's scheduler loop, as far as the tree sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sglang_lora_tree.radix.residency import Demand, Verdict

from .tree import Running, Tree, round_up


class Loop:
    """SGLang's scheduler loop, as far as the tree sees it: one pass over the queue, one decode step."""

    def __init__(self, tree: Tree, ratio: float = 1.0) -> None:
        self.tree = tree
        self.ratio = ratio
        """Share of the output that admission reserves (SGLang's new_token_ratio); below 1, requests are retracted."""
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.finished: list[str] = []
        self.failed: dict[str, str] = {}
        self.admitted: list[str] = []
        self.retractions = 0

    def submit(
        self,
        name: str,
        weights: Mapping[str, float] | None,
        tokens: Sequence[int],
        num_new: int = 1,
        extra_key: str | None = None,
    ) -> bool:
        """Queue a request; False if its length and its adapters do not fit together (a 400)."""
        demand, residency = self.tree.demand(weights), self.tree.residency
        if residency.find_misfit(demand, len(tokens)) is not None:
            return False
        # SGLang bounds requests for the bare pool in the same way.
        num_new = min(num_new, residency.room_for_output(demand, len(tokens)))
        request = Running(self.tree, name, demand, list(tokens), extra_key, num_new)
        request.prompt = len(tokens)
        self.waiting.append(request)
        return True

    def abort(self, name: str) -> None:
        self.waiting = [request for request in self.waiting if request.id != name]

    def step(self) -> None:
        self.tree.residency.poll(self.live)
        self.tree.cache.check_hicache_events()
        self._pass()
        self._decode()

    def run(self, max_steps: int) -> int:
        """Step until nobody waits or runs; returns how many steps it took."""
        for count in range(max_steps):
            if not self.waiting and not self.running:
                return count
            self.tree.finish_reads()  # disks are quick here; passes are what is counted
            self.step()
            self.tree.check()
        waiting, running = [request.id for request in self.waiting], [request.id for request in self.running]
        raise AssertionError(f"{waiting} wait and {running} run after {max_steps} steps: {self.tree.describe()}")

    def live(self) -> list[tuple[Demand | None, int]]:
        return [(request.demand, request.prompt + request.num_new) for request in self.waiting + self.running]

    def _promised(self, requests: Iterable[Running]) -> float:
        page = self.tree.page_size
        return sum(max(request.remaining, 0) * self.ratio + page for request in requests)

    def _pass(self) -> None:
        residency, cache = self.tree.residency, self.tree.cache
        residency.begin_pass(request.id for request in self.waiting)
        promised = self._promised(self.running)
        admitted: list[Running] = []
        ready: list[Running] = []
        failed: list[Running] = []
        for request in self.waiting:
            room = int(cache.num_free_slots + cache.evictable_size() - promised)
            alone = not admitted and not self.running
            verdict = residency.admit(request.id, request.demand, room, alone)
            if verdict is Verdict.FAILED:
                failed.append(request)
                self.failed[request.id] = str(residency.failure_of(request.id, request.demand))
            if verdict is not Verdict.READY:
                continue
            ready.append(request)
            whole = request.num_new
            request.num_new = int(max(request.remaining, 1) * self.ratio)
            fits = request.lock(int(promised))
            request.num_new = whole
            if not fits:
                break
            admitted.append(request)
            missing = round_up(len(request.tokens), self.tree.page_size) - len(request.slots)
            promised += missing + self._promised([request])
        if admitted:
            cache.ready_to_load_host_cache()
        for request in admitted:
            with cache.last_resort():
                request.allocate()
            residency.note_admitted(request.id, request.demand)
        alone = not admitted and not self.running
        for request in ready:
            if request not in admitted:
                residency.note_rejected(request.id, alone)
        residency.end_pass(batch_formed=bool(admitted))
        self.waiting = [request for request in self.waiting if request not in admitted and request not in failed]
        self.running += admitted
        self.admitted += [request.id for request in admitted]

    def _append(self, request: Running) -> bool:
        token = len(request.tokens) % 7
        if len(self.running) > 1:
            return request.append(token)
        with self.tree.cache.last_resort():
            return request.append(token)

    def _decode(self) -> None:
        """Slots for all first, requests that are done last: what they leave is being backed up, and locked, until then."""
        for request in list(self.running):
            while request in self.running and request.remaining > 0 and not self._append(request):
                victim = self.running[-1]
                assert len(self.running) > 1, f"the last running request is out of slots: {self.tree.describe()}"
                self.running.remove(victim)
                victim.abort()  # as SGLang: nothing goes to the tree, for the same reason
                self.waiting.insert(0, victim)
                self.retractions += 1
        for request in [request for request in self.running if request.remaining <= 0]:
            self.running.remove(request)
            request.finish()
            self.finished.append(request.id)
