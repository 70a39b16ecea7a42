"""The study: the paper's findings at the size that one GPU affords, on books; `python -m csympow.study`.

| module       |                                                                     |
|--------------|---------------------------------------------------------------------|
| `prepare`    | books to a dataset                                                  |
| `config`     | the schema: which contexts, which sweep, how many tokens            |
| `plan`       | the runs, the most telling ones first, and what the sweep chose     |
| `workers`    | runs of train.py and eval.py, several at once, within a time budget |
| `records`    | what is kept of a run                                               |
| `program`    | the command line                                                    |
| `report`     | figures, tables and docs/results.md from what is kept               |
"""
