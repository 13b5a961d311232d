"""Command-line tools: one package or module for each subcommand of ``ringdance``.

``cli`` lists all subcommands. Most tools inspect machines and the files written by jobs without being part of
a job. Some start ranks of their own to take measurements.
"""
