"""The tools around a job: one package or module for each subcommand of ``ringdance``.

``cli`` lists all subcommands. Tools look at machines, and at the files that a job wrote, from outside.
Some of them start ranks to measure.
"""
