"""tokenyard's implementation of DeepEP's interface, by DeepEP's name. The code is in `tokenyard.deep_ep`."""

import tokenyard

_is_tokenyard = True
tokenyard.alias_deep_ep()
