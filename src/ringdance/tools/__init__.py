"""Command-line tools: one package or module for each subcommand of ``ringdance``.

``cli`` lists all subcommands. Most tools inspect machines, or files written by jobs, without being part of a
job. Some tools start their own ranks to take measurements.
"""
