//! The output of a command before its work and during it: the config in one line, then a progress
//! bar, on standard error, where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokenyard_core::config::Config;

/// A bar of `steps` steps. It redraws itself, so that the time of a long step is visible.
pub(crate) fn bar(steps: u64) -> ProgressBar {
    // The bar hides itself where standard error is no terminal.
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    // This does not disturb a measurement: ranks are other processes, and this process sleeps
    // between redraws.
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// The choices of a config.
pub(crate) fn head(config: &Config) -> String {
    let up = config.scale_up.as_ref().map_or("none", |choice| &choice.name);
    let out: Vec<&str> = config.scale_out.iter().map(|choice| choice.name.as_str()).collect();
    let out = if out.is_empty() { "none".to_owned() } else { out.join(" or ") };
    let kernels = &config.kernels.name;
    format!("{}: kernels {kernels}, scale-up {up}, scale-out {out}", config.name)
}
