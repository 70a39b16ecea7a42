"""What a trained model can do.

`program.py` is the command line. A task is a module with `add_options(parser)`, its own flags, `READS_RUNS`, whether it
reads the first three of those below, and `run(args)`, which writes TASK.csv, TASK.json and TASK.png to `args.out` and
prints a table. Every task is given

    args.workdir      runs, for `runs.open_runs(args)`, or one by one `runs.open_run(directory, args.step)`
    args.step         the checkpoint's step, or None for the newest that is whole
    args.max_context  the longest context to evaluate, in tokens
    args.out          an existing directory
    args.stop         a `csympow.train.stop.Stop`: `check()` it between pieces of work

and raises a ConfigError, in one line, for what its user can mend, and at its end a NotFiniteError if a model had no
numbers to say.
"""
