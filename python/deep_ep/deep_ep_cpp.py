"""What DeepEP's native module offers to scripts. The code is in `tokenyard.deep_ep._C`."""

import tokenyard

tokenyard.alias_deep_ep()
