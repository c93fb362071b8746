"""The calls, on tensors of torch. On GPUs the host reads only values that DeepEP gives on the host.

On the CPU there are no streams. There the host looks at values of a routing, leaves nothing undefined behind the rows
that arrived, and makes low latency calls in halves.
"""
