"""The names of DeepEP's native module that scripts use. The code is in `tokenyard.deep_ep._C`."""

import tokenyard

tokenyard.alias_deep_ep()
