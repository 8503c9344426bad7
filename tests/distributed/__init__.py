"""Two CPU processes: every process layout against one process with the same rollouts.

`cases.py` says what is trained, `layouts.py` how the processes share a model, `worker.py` is what each process runs.
"""
