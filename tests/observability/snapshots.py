"""Snapshots of trees that no server has, as ``GET /lora_tree`` would answer them."""

import random

NAMES = ("math", "json", "sql", "polite", "legal", "medical", "python", "haiku", "french", "summary")


class SnapshotMaker:
    def __init__(self):
        self.nodes, self.registered = [], {}
        self.root = self._add(None, kind="virtual root", slots=0, host=False)

    def _add(self, parent, **fields):
        entry = {
            "id": len(self.nodes),
            "parent": None if parent is None else parent["id"],
            "loading": False,
            "locks": 0,
        }
        entry |= {"visits": 0, "gpu": True, "host": True, **fields}
        self.nodes.append(entry)
        return entry

    def adapter(self, name, slots=40, tier="gpu", **fields):
        """tier "disk": registered only, no node."""
        identity = f"adapter:{name}"
        self.registered[name] = {"identity": identity, "pinned": False, "slots": slots, "tier": tier, "visits": 0}
        if tier == "disk":
            return None
        fields = {"gpu": tier != "host", "loading": tier == "loading", **fields}
        return self._add(self.root, kind="adapter", name=name, identity=identity, registered=True, slots=slots, **fields)

    def mix(self, weights, **fields):
        members = [{"identity": f"adapter:{name}", "name": name, "weight": w} for name, w in weights.items()]
        identity = f"mix:{len(self.nodes)}"
        fields = {"slots": 1, **fields}
        return self._add(self.root, kind="mix", identity=identity, registered=True, members=members, **fields)

    def kv(self, parent, slots=10, **fields):
        return self._add(parent, kind="kv", slots=slots, **fields)

    def snapshot(self):
        slots = {tier: dict.fromkeys(("adapter", "mix", "history_kv", "running_kv"), 0) for tier in ("gpu", "host")}
        for entry in self.nodes[1:]:
            for tier in ("gpu", "host"):
                running = tier == "gpu" and entry["locks"]
                kind = entry["kind"] if entry["kind"] != "kv" else "running_kv" if running else "history_kv"
                slots[tier][kind] += entry["slots"] if entry[tier] else 0
        for tier in slots:
            slots[tier]["free"] = 100 + sum(slots[tier].values()) // 2
        tiers = dict.fromkeys(("gpu", "loading", "host", "disk"), 0)
        for adapter in self.registered.values():
            tiers[adapter["tier"]] += 1
        return {
            "pool": {
                "slots": slots,
                "gpu_size": sum(slots["gpu"].values()),
                "host_size": sum(slots["host"].values()),
                "page_size": 1,
                "slot_bytes": 131072,
            },
            "adapters": tiers,
            "num_registered": len(self.registered),
            "registered": self.registered,
            "num_kv_nodes": sum(entry["kind"] == "kv" for entry in self.nodes),
            "invalid_kv": 0,
            "counters": {"adapter_hits": 12, "cold_start_seconds": 1.2345},
            "nodes": self.nodes,
            "complete": True,
        }


def small_snapshot():
    maker = SnapshotMaker()
    math = maker.adapter("math", slots=80, visits=12, locks=1)
    maker.adapter("json", tier="host", visits=3)
    maker.adapter("sql", tier="loading")
    maker.adapter("cold", tier="disk")
    mix = maker.mix({"math": 0.7, "json": -0.25}, gpu=False, visits=1)
    turn = maker.kv(math, slots=128, visits=4)
    maker.kv(turn, slots=1, host=False, locks=2)
    maker.kv(mix, slots=33, gpu=False)
    maker.kv(maker.root, slots=7)
    return maker.snapshot()


def random_snapshot(num_adapters, num_mixes, num_kv, seed=0):
    choose = random.Random(seed)
    maker = SnapshotMaker()
    tops = []
    for number in range(num_adapters):
        name = NAMES[number] if number < len(NAMES) else f"tenant-{number:03d}"
        tier = choose.choices(("gpu", "host", "loading"), (6, 3, 1))[0]
        locks = choose.choice((0, 0, 1, 3)) if tier == "gpu" else 0
        tops.append(maker.adapter(name, choose.choice((40, 80, 160)), tier, visits=choose.randrange(200), locks=locks))
    for _ in range(num_mixes):
        members = choose.sample(tops[:num_adapters], 2)
        weights = dict(zip((member["name"] for member in members), (0.7, choose.choice((0.3, -0.25))), strict=True))
        tops.append(maker.mix(weights, gpu=all(member["gpu"] for member in members), visits=choose.randrange(50)))
    below = {top["id"]: [] for top in (*tops, maker.root)}
    for _ in range(num_kv):
        top = choose.choice((*tops, maker.root))
        parent = choose.choice(below[top["id"]]) if below[top["id"]] and choose.random() < 0.6 else top
        gpu = parent["gpu"] and choose.random() < 0.8
        host = not gpu or choose.random() < 0.6
        locks = 1 if gpu and choose.random() < 0.1 else 0
        below[top["id"]].append(
            maker.kv(parent, choose.randrange(5, 400), gpu=gpu, host=host, locks=locks, visits=choose.randrange(20))
        )
    return maker.snapshot()
