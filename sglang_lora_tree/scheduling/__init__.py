"""Which request runs next, and what must be on the GPU for it.

In: SGLang's waiting queue. Out: a request is admitted only when every adapter it needs is on the GPU; until then its
adapters are on their way. ``scheduler_hooks`` is the one file that knows SGLang's scheduler.
"""
