"""One HTML page about a run, several beside each other, or a plan. Nothing here imports torch or needs a network.

``reading`` streams the files of a run into a ``Run`` of bounded size: its curves in ``buckets``, the load of its
experts in ``loads``. A module of ``sections`` tells and draws one subject, and ``comparing`` what several runs have
different. ``charts`` makes the pictures and ``words`` the numbers. ``page`` is about runs and ``plan_page`` about
plans; ``rendering`` puts either into HTML.
"""
