"""The tools around a job: one package or module for each subcommand of ``ringdance``.

``cli`` has the list of all subcommands. Tools look at machines and at what a job has written from outside; those
that measure start ranks.
"""
