//! The gin backend as a loadable plugin.
//! Watched by `python/tests/test_package.py`, which finds it in the wheel.

tokenyard_core::export_transports!(tokenyard_gin::Gin);
