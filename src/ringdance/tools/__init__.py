"""Command-line tools: one package or module per ``ringdance`` subcommand.

``cli`` lists all subcommands. Most tools run outside a job and inspect machines or
files that jobs have written. Some tools start their own ranks to take measurements.
"""
