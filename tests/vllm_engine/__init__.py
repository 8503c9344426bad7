"""A real vLLM engine, on the CPU and inside the training process: TRL's colocate mode. `make test-vllm` runs it.

`worker.py` is what each process trains and records, `test_colocate.py` what has to be true of the records.
"""
