//! What a command shows before its work and while it works: the config in one line, then one kind of bar, on
//! standard error, where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokenyard_core::config::Config;

/// A bar of so many steps. It redraws itself, so that a step that takes long is seen to be timed.
pub(crate) fn bar(steps: u64) -> ProgressBar {
    // Hidden by itself where standard error is no terminal.
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    // A measurement is not disturbed: ranks are other processes, and this one sleeps in between.
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// What a config chooses.
pub(crate) fn head(config: &Config) -> String {
    let up = config.scale_up.as_ref().map_or("none", |choice| &choice.name);
    let out: Vec<&str> = config.scale_out.iter().map(|choice| choice.name.as_str()).collect();
    let out = if out.is_empty() { "none".to_owned() } else { out.join(" or ") };
    let kernels = &config.kernels.name;
    format!("{}: kernels {kernels}, scale-up {up}, scale-out {out}", config.name)
}
