"""Which request runs next, and what must be on the GPU for it.

In: SGLang's waiting queue, and plans of the advisor. Out: a request is admitted only when every adapter it needs is on the GPU;
until then its adapters are on their way. Files, from the bottom up:

``orders``, ``lag``, ``fairness``, ``admission``: who is looked at first, and who is refused; pure functions of their input.
``waiting_queue``: numbered requests, the ranks' shared clock, and the window of a long queue that a pass looks at.
``protocol``: every message between scheduler, advisor and ranks.
``mirror``, ``planner``, ``advisor``: the process beside the scheduler. ``client``, ``reporter``: the scheduler's end of the talk.
``swapper``: carries out what a plan wants to come in ahead.
``scheduler_hooks`` (admission, loading), ``pause_hooks`` (loading while paused), ``queue_hooks`` (the order), ``plan_hooks``
(plans and the clock), ``overload_hooks`` (refusals): the files that know SGLang's scheduler.
"""
