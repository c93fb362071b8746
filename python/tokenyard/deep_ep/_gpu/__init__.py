"""The calls on tensors of torch that lie on GPUs. The host reads only values that DeepEP gives on the host.

Nothing in it is special to a GPU but streams, so tests run it on tensors in host memory, too.
"""
