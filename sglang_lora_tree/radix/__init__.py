"""The tree and the pool: virtual root -> LoRA nodes and mix nodes -> KV nodes, all of it token slots of one allocator.

In: adapters (from ``adapters``) and SGLang's requests. Out: which slots hold which adapter or prefix, on the GPU and in host
memory, and what must leave when memory is short. Files, from the bottom up:

* ``agreement`` (do ranks hold the same), ``leftovers`` (files of killed servers), ``identity`` (names of subtrees), ``layout``
  (adapter <-> rows <-> slots);
* what leaves first: ``leaf_index`` (an order of leaves), ``eval`` and ``reuse`` (what a node is worth), ``policies`` (theirs and
  the usual ones);
* ``store`` (which adapters there are), and reading them: ``adapter_files`` (questions and answers), ``reader_process`` (a child
  that answers), ``disk_reader`` (at the same step on every rank);
* ``plain_*_hooks`` (SGLang's tree, node and component for plain KV), ``lora_*_hooks``, ``tree_core_hooks`` and ``cache_hooks``
  (the same with our two extra layers), ``look_ahead_hooks`` (waiting requests touch what they will use);
* ``tiers`` (disk, host, GPU: who is where, and the steps between), ``pins`` and ``residency`` (who may come in, and when).
"""
