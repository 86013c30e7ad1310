"""One HTML page about a run, or several beside each other. Nothing here imports torch or needs a network.

``reading`` streams the files of a run into a ``Run`` of bounded size: its curves in ``buckets``, the load of its
experts in ``loads``. A module of ``sections`` tells and draws one subject, and ``comparing`` what several runs have
different. ``charts`` makes the pictures, ``words`` the numbers, and ``page`` puts all into HTML.
"""
