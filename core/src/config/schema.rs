//! The keys of the file, and their allowed values.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::time::Duration;

use super::source::{Item, MILLISECONDS, Section, Source};
use super::{
    ComponentChoice, ComponentTable, Config, Lines, MAX_CHOICES, OnFailure, Reports, UnusedTable,
    WorldConfig,
};
use crate::bootstrap::Rendezvous;
use crate::{Error, Result};

const DEFAULT_DEADLINE_MS: u64 = 30_000;
const DEFAULT_LATE_MS: u64 = 30 * 60 * 1000;
const MIN_DEADLINE_MS: u64 = 100;
const MAX_DEADLINE_MS: u64 = 60 * 60 * 1000;
const MAX_DOMAINS: u64 = 65_536;
/// The kernel's limit, without the NUL.
const MAX_INTERFACE: usize = 15;
const MAX_LATE_MS: u64 = 7 * 24 * 60 * 60 * 1000;

/// Stands for "no transport at this level"; never the name of a component.
const NONE: &str = "none";

/// Words that cannot be the name of a component, because they have another meaning in the same place.
const RESERVED: [&str; 3] = [NONE, "use", "domains"];

const MAX_NAME: usize = 64;
const COMPONENT_NAME: &str = "a component's name: 1 to 64 characters of a-z, 0-9, _ and -";

/// The errors in a file, in the order in which they were found.
#[derive(Debug, Default)]
pub(super) struct Errors(Vec<Error>);

impl Errors {
    /// The value; an error is recorded.
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(error)).ok()
    }

    /// Records every key of `section` that is not in `known`.
    fn unknown_keys(&mut self, section: &Section<'_>, known: &[&str]) {
        self.0.extend(section.unknown_keys(known));
    }

    /// The value of an optional key.
    fn read<'a, T>(
        &mut self,
        section: &Section<'a>,
        key: &str,
        read: impl FnOnce(&Item<'a>) -> Result<T>,
    ) -> Option<T> {
        section.get(key).and_then(|item| self.note(read(&item)))
    }
}

/// Reads the whole file; every section and every key is checked, even after an error. The config is there if all
/// components are known.
pub(super) fn read(source: &Source<'_>) -> (Option<Config>, Vec<Error>) {
    let document = match source.parse() {
        Ok(document) => document,
        Err(error) => return (None, vec![error]),
    };
    let root = Section::root(source, &document);
    let mut errors = Errors::default();
    errors.unknown_keys(&root, &["world", "kernels", "transport", "topology", "plugins"]);

    let mut unused_tables = Vec::new();
    let mut lines = Lines::default();
    let world = errors.note(root.section("world")).flatten();
    let (world, reports) = read_world(world, &mut errors);
    let kernels = read_kernels(&root, &mut unused_tables, &mut errors);
    let kernels = errors.note(kernels);
    let transports = read_transports(&root, &mut unused_tables, &mut errors);
    let transports = errors.note(transports);
    let topology = read_topology(&root, &mut unused_tables, &mut lines, &mut errors);
    let topology = errors.note(topology);
    let plugins = errors.note(root.section("plugins")).flatten();
    let plugins = read_plugins(plugins, &mut errors, &mut lines);
    let (Some(kernels), Some((scale_up, scale_out)), Some((topology, domains))) =
        (kernels, transports, topology)
    else {
        return (None, errors.0);
    };
    let config = Config {
        name: source.name().to_owned(),
        digest: source.digest(),
        world,
        reports,
        kernels,
        scale_up,
        scale_out,
        topology,
        domains,
        plugins,
        unused_tables,
        lines,
    };
    (Some(config), errors.0)
}

fn read_world(section: Option<Section<'_>>, errors: &mut Errors) -> (WorldConfig, Reports) {
    let mut world = WorldConfig {
        bootstrap: "env".to_owned(),
        interface: None,
        deadline: Duration::from_millis(DEFAULT_DEADLINE_MS),
        late: Duration::from_millis(DEFAULT_LATE_MS),
        on_failure: OnFailure::Stop,
    };
    let mut folder = Reports::default();
    let Some(section) = section else { return (world, folder) };
    let known = ["bootstrap", "interface", "deadline_ms", "late_ms", "on_failure", "reports"];
    errors.unknown_keys(&section, &known);
    if let Some(spec) = errors.read(&section, "bootstrap", |item| bootstrap(item)) {
        world.bootstrap = spec.to_owned();
    }
    let name = errors.read(&section, "interface", |item| interface(item));
    world.interface = name.map(str::to_owned);
    if let Some(found) = errors.read(&section, "on_failure", on_failure) {
        world.on_failure = found;
    }
    if let Some(found) = errors.read(&section, "reports", reports) {
        folder = found;
    }
    let deadline = |item: &Item<'_>| item.integer(MIN_DEADLINE_MS..=MAX_DEADLINE_MS, MILLISECONDS);
    if let Some(ms) = errors.read(&section, "deadline_ms", deadline) {
        world.deadline = Duration::from_millis(ms);
    }
    let late = |item: &Item<'_>| {
        let ms = item.integer(MIN_DEADLINE_MS..=MAX_LATE_MS, MILLISECONDS)?;
        let deadline = world.deadline.as_millis();
        if u128::from(ms) < deadline {
            let expected = format!("at least world.deadline_ms, which is {deadline}");
            return Err(item.error("is too short", &expected));
        }
        Ok(ms)
    };
    let late = errors.read(&section, "late_ms", late).unwrap_or(DEFAULT_LATE_MS);
    // Only a value from the file can be too short; the default follows the deadline.
    world.late = Duration::from_millis(late).max(world.deadline);
    (world, folder)
}

fn on_failure(item: &Item<'_>) -> Result<OnFailure> {
    let expected = "\"stop\" or \"mask\"";
    let found = item.string(expected)?;
    [OnFailure::Stop, OnFailure::Mask]
        .into_iter()
        .find(|known| known.name() == found)
        .ok_or_else(|| item.error("is not known", expected))
}

fn reports(item: &Item<'_>) -> Result<Reports> {
    let expected = "an absolute path to a folder, or \"none\"";
    match item.string(expected)? {
        NONE => Ok(Reports::Nowhere),
        path if path.starts_with('/') && !path.contains('\0') => Ok(Reports::Folder(path.into())),
        _ => Err(item.error("is not the path of a folder", expected)),
    }
}

fn bootstrap<'a>(item: &Item<'a>) -> Result<&'a str> {
    let expected = "\"env\", \"tcp://host:port\" or \"file:///path\"";
    let spec = item.string(expected)?;
    if spec == "env" {
        return Ok(spec);
    }
    match Rendezvous::judge(spec) {
        Ok(_) => Ok(spec),
        Err(why) => Err(item.error(&format!("is not a rendezvous: it {why}"), expected)),
    }
}

fn interface<'a>(item: &Item<'a>) -> Result<&'a str> {
    let expected = "the name of a network interface: 1 to 15 characters, no / and no white space";
    let name = item.string(expected)?;
    let allowed = |c: char| c != '/' && !c.is_whitespace() && !c.is_control();
    if (1..=MAX_INTERFACE).contains(&name.len()) && name.chars().all(allowed) {
        Ok(name)
    } else {
        Err(item.error("is not the name of an interface", expected))
    }
}

fn read_kernels(
    root: &Section<'_>,
    unused: &mut Vec<UnusedTable>,
    errors: &mut Errors,
) -> Result<ComponentChoice> {
    let section = root.section("kernels")?.ok_or_else(|| {
        let fix = "add [kernels] with, for example, use = \"cpu\"";
        root.source().error("missing section [kernels]; expected a kernel set").with_fix(fix)
    })?;
    let item = section.require("use", "the name of a kernel set, such as \"cpu\"")?;
    let choice = choose(&section, &item)?;
    errors.note(check_tables(&section, from_ref(&choice), &["use"], unused));
    Ok(choice)
}

fn read_topology(
    root: &Section<'_>,
    unused: &mut Vec<UnusedTable>,
    lines: &mut Lines,
    errors: &mut Errors,
) -> Result<(ComponentChoice, Option<u32>)> {
    let section = root.section("topology")?;
    let choice = match section.as_ref().and_then(|section| Some((section, section.get("use")?))) {
        Some((section, item)) => choose(section, &item)?,
        None => {
            let table = match &section {
                Some(section) => own_table(section, "auto")?,
                None => ComponentTable::from_text("", root.source().name()),
            };
            ComponentChoice { name: "auto".to_owned(), line: 0, table }
        }
    };
    let mut domains = None;
    if let Some(section) = section {
        errors.note(check_tables(&section, from_ref(&choice), &["use", "domains"], unused));
        if let Some(item) = section.get("domains") {
            let found = errors.note(item.integer(1..=MAX_DOMAINS, "domains"));
            domains = found.map(|found| found as u32);
            lines.domains = item.line();
        }
    }
    Ok((choice, domains))
}

/// The choices for scale-up and for scale-out.
fn read_transports(
    root: &Section<'_>,
    unused: &mut Vec<UnusedTable>,
    errors: &mut Errors,
) -> Result<(Option<ComponentChoice>, Vec<ComponentChoice>)> {
    let fix = "name a transport in [transport.scale_up] or [transport.scale_out]";
    let section = root.section("transport")?.ok_or_else(|| {
        let message = "missing section [transport]; expected a transport for at least one level";
        root.source().error(message).with_fix(fix)
    })?;
    errors.unknown_keys(&section, &["scale_up", "scale_out"]);
    let mut scale_up = None;
    if let Some(level) = section.section("scale_up")? {
        let expected = "the name of a transport, or \"none\"";
        let item = level.require("use", expected)?;
        if item.string(expected)? != NONE {
            scale_up = Some(choose(&level, &item)?);
        }
        errors.note(check_tables(&level, scale_up.as_slice(), &["use"], unused));
    }
    let mut scale_out = Vec::new();
    if let Some(level) = section.section("scale_out")? {
        scale_out = choose_in_order(&level)?;
        errors.note(check_tables(&level, &scale_out, &["use"], unused));
    }
    if scale_up.is_none() && scale_out.is_empty() {
        let message = "no transport: scale_up and scale_out are both none; expected at least one";
        return Err(section.error(message).with_fix(fix));
    }
    Ok((scale_up, scale_out))
}

/// The value of `use` where it may be a name, a list of names, or "none".
fn choose_in_order(section: &Section<'_>) -> Result<Vec<ComponentChoice>> {
    let expected = "the name of a transport, a list of names, or \"none\"";
    let item = section.require("use", expected)?;
    let Some(elements) = item.elements() else {
        return match item.string(expected)? {
            NONE => Ok(Vec::new()),
            _ => Ok(vec![choose(section, &item)?]),
        };
    };
    if elements.is_empty() || elements.len() > MAX_CHOICES {
        let problem = format!("has {} names", elements.len());
        let expected = format!("1 to {MAX_CHOICES} names; \"none\" stands for no transport");
        return Err(item.error(&problem, &expected));
    }
    let mut choices: Vec<ComponentChoice> = Vec::new();
    for element in &elements {
        let choice = choose(section, element)?;
        if let Some(first) = choices.iter().position(|earlier| earlier.name == choice.name) {
            let problem = format!("repeats {}[{first}]", item.path());
            return Err(element.error(&problem, "each name once"));
        }
        choices.push(choice);
    }
    Ok(choices)
}

/// The component that `item` names, with its own table.
fn choose(section: &Section<'_>, item: &Item<'_>) -> Result<ComponentChoice> {
    let name = item.string(COMPONENT_NAME)?;
    if RESERVED.contains(&name) {
        return Err(item.error("is a reserved word", "the name of a component"));
    }
    if !is_component_name(name) {
        return Err(item.error("is not the name of a component", COMPONENT_NAME));
    }
    Ok(ComponentChoice {
        name: name.to_owned(),
        line: item.line(),
        table: own_table(section, name)?,
    })
}

fn own_table(section: &Section<'_>, component: &str) -> Result<ComponentTable> {
    match section.get(component) {
        Some(item) => ComponentTable::extract(&item),
        None => Ok(ComponentTable::from_text("", section.source().name())),
    }
}

/// Checks that all entries besides the section's own keys are tables of components, and records the
/// tables of components that are not chosen.
fn check_tables(
    section: &Section<'_>,
    chosen: &[ComponentChoice],
    own: &[&str],
    unused: &mut Vec<UnusedTable>,
) -> Result<()> {
    for (key, item) in section.entries() {
        if own.contains(&key) {
            continue;
        }
        if item.table().is_none() {
            // The name that `use` has may be misspelt: only the registry knows the components.
            let fix = format!(
                "a component's own keys belong in its own table, [{}.NAME] with NAME as in `use`",
                section.path()
            );
            return Err(section.unknown(key, &item, own).with_fix(fix));
        }
        if !is_component_name(key) {
            return Err(item.error("is not named after a component", COMPONENT_NAME));
        }
        if !chosen.iter().any(|choice| choice.name == key) {
            let section = section.path().to_owned();
            unused.push(UnusedTable { section, component: key.to_owned(), line: item.line() });
        }
    }
    Ok(())
}

fn is_component_name(name: &str) -> bool {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) && !RESERVED.contains(&name)
}

fn read_plugins(
    section: Option<Section<'_>>,
    errors: &mut Errors,
    lines: &mut Lines,
) -> Vec<PathBuf> {
    let Some(section) = section else { return Vec::new() };
    errors.unknown_keys(&section, &["paths"]);
    let expected = "an array of absolute paths";
    let elements = section
        .require("paths", expected)
        .and_then(|item| item.elements().ok_or_else(|| item.wrong_type(expected)));
    let Some(elements) = errors.note(elements) else { return Vec::new() };
    let mut paths = Vec::with_capacity(elements.len());
    let mut first_use = BTreeMap::new();
    for (i, element) in elements.iter().enumerate() {
        let Some(path) = errors.note(plugin_path(element)) else { continue };
        if let Some(first) = first_use.insert(path, i) {
            let problem = format!("repeats plugins.paths[{first}]");
            errors.0.push(element.error(&problem, "each path once"));
        }
        paths.push(path.to_owned());
        lines.plugins.push(element.line());
    }
    paths
}

fn plugin_path<'a>(item: &Item<'a>) -> Result<&'a Path> {
    let expected = "an absolute path to a file or folder";
    let text = item.string(expected)?;
    if text.contains('\0') {
        return Err(item.error("contains a NUL character", expected));
    }
    let path = Path::new(text);
    if path.is_relative() {
        // A relative path would let the current folder decide which code runs.
        let fix = "write the path from / on; ~ and variables are not expanded";
        return Err(item.error("is relative", expected).with_fix(fix));
    }
    Ok(path)
}
