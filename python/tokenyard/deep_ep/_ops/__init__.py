"""Operations beside dispatch and combine: messages, all-gathers, sums, and tables of entries.

The buffers of DeepEP 2.1 and 2.5 are faces of these.
"""
