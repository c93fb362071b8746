"""The calls, on tensors of torch. On GPUs the host reads only values that DeepEP gives on the host.

Nothing but streams is special to a GPU, and nothing but the halves of low latency calls to the CPU.
"""
