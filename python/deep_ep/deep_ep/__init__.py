"""tokenyard's implementation of DeepEP's interface, by DeepEP's name. The code is in `tokenyard.deep_ep`."""

import os as _os

import tokenyard
from tokenyard._alias import warn_of_strangers as _warn_of_strangers

_is_tokenyard = True
_warn_of_strangers(_os.path.dirname(__file__))
tokenyard.alias_deep_ep()
