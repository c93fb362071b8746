//! The rules of this repository that no compiler knows: its words, its names, the widths of its lines, its folders.

mod engines;
mod environment;
mod module_circles;
mod named;
mod names;
mod paragraphs;
mod product;
mod prose;
mod signatures;
mod sources;
mod texts;
mod widths;
