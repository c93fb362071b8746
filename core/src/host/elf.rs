//! Judges a plugin's file before the dynamic loader maps it.
//!
//! The dynamic loader trusts a file's headers. If they name bytes that the file does not have, the process
//! dies by SIGBUS as soon as one of these bytes is read. So the headers are compared with the file first, and
//! a file that is no library for this machine is refused with the reason.

use object::Endianness;
use object::elf::{
    ELFCLASS32, ELFCLASS64, ELFDATA2LSB, ELFDATA2MSB, ELFMAG, EM_386, EM_AARCH64, EM_ARM, EM_PPC64,
    EM_RISCV, EM_S390, EM_X86_64, ET_CORE, ET_DYN, ET_EXEC, ET_REL, FileHeader64, PT_LOAD,
    ProgramHeader64,
};
use object::read::ReadRef;

/// The reason why a file cannot be a plugin here.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unfit {
    /// The values found and expected.
    pub(super) problem: String,
    pub(super) fix: &'static str,
}

/// The ELF number of this program's machine, where this module knows it.
const MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
    Some(EM_X86_64)
} else if cfg!(target_arch = "aarch64") {
    Some(EM_AARCH64)
} else {
    None
};
const BYTE_ORDER: u8 = if cfg!(target_endian = "little") { ELFDATA2LSB } else { ELFDATA2MSB };

const COPY_AGAIN: &str = "copy or build the plugin again";
const BUILD_HERE: &str = "build the plugin for this machine, or name the one that is";

/// Judges the file whose bytes are `data`. No byte of it is trusted; only its headers are read.
///
/// # Errors
/// [`Unfit`]: no ELF file, another kind of machine, no shared library, or cut short.
pub(super) fn judge<'a>(data: impl ReadRef<'a>) -> Result<(), Unfit> {
    let length = data.len().map_err(|()| unfit("its size cannot be read", COPY_AGAIN))?;
    judge_identity(data, length)?;
    let needed = size_of::<FileHeader64<Endianness>>() as u64;
    let header =
        data.read_at::<FileHeader64<Endianness>>(0).map_err(|()| cut_short(needed, length))?;
    let order = if BYTE_ORDER == ELFDATA2LSB { Endianness::Little } else { Endianness::Big };
    judge_kind(header.e_type.get(order), header.e_machine.get(order))?;

    let entry = size_of::<ProgramHeader64<Endianness>>();
    let (count, size) = (header.e_phnum.get(order), header.e_phentsize.get(order));
    if usize::from(size) != entry || count == 0 {
        let problem = format!(
            "its headers are damaged: found {count} program headers of {size} bytes; expected at \
             least one, of {entry} bytes"
        );
        return Err(unfit(problem, COPY_AGAIN));
    }
    let start = header.e_phoff.get(order);
    covers(length, start, u64::from(count) * u64::from(size))?;
    let headers = data
        .read_slice_at::<ProgramHeader64<Endianness>>(start, count.into())
        .map_err(|()| unfit("its program headers cannot be read", COPY_AGAIN))?;
    for segment in headers.iter().filter(|header| header.p_type.get(order) == PT_LOAD) {
        covers(length, segment.p_offset.get(order), segment.p_filesz.get(order))?;
    }
    // The section table is not needed to load the library, but it lies at the end: where it is missing,
    // bytes are lost.
    let sections = u64::from(header.e_shnum.get(order)) * u64::from(header.e_shentsize.get(order));
    covers(length, header.e_shoff.get(order), sections)
}

/// The first 16 bytes: the format of the rest of the file.
fn judge_identity<'a>(data: impl ReadRef<'a>, length: u64) -> Result<(), Unfit> {
    let start = data.read_bytes_at(0, length.min(16)).unwrap_or_default();
    if length == 0 {
        return Err(unfit("the file is empty; expected a shared library", COPY_AGAIN));
    }
    let magic = start.get(..ELFMAG.len().min(start.len())).unwrap_or_default();
    if !ELFMAG.starts_with(magic) {
        let problem = format!(
            "it is no ELF file: found \"{}\" at its start; expected a shared library",
            magic.escape_ascii()
        );
        return Err(unfit(problem, "name a shared library (`file PATH` shows its type)"));
    }
    let (Some(class), Some(order)) = (start.get(4).copied(), start.get(5).copied()) else {
        return Err(cut_short(16, length));
    };
    let problem = match (class, order) {
        (ELFCLASS64, order) if order == BYTE_ORDER => return Ok(()),
        (ELFCLASS32, _) => "it is a 32-bit library; expected a 64-bit one".to_owned(),
        (ELFCLASS64, ELFDATA2MSB) => "it is big-endian; expected a little-endian library".into(),
        (ELFCLASS64, ELFDATA2LSB) => "it is little-endian; expected a big-endian library".into(),
        (ELFCLASS64, order) => format!("its headers are damaged: found byte order {order}"),
        (class, _) => format!("its headers are damaged: found class {class}"),
    };
    Err(unfit(problem, if class <= ELFCLASS64 { BUILD_HERE } else { COPY_AGAIN }))
}

fn judge_kind(kind: u16, machine: u16) -> Result<(), Unfit> {
    let found = match kind {
        ET_DYN => None,
        ET_REL => Some("an object file"),
        ET_EXEC => Some("a program"),
        ET_CORE => Some("a core dump"),
        _ => Some("an ELF file of another kind"),
    };
    if let Some(found) = found {
        let problem = format!("it is {found}; expected a shared library");
        return Err(unfit(problem, "link the plugin as a shared library (cdylib, cc -shared)"));
    }
    match MACHINE {
        Some(expected) if machine != expected => {
            let (found, expected) = (machine_name(machine), machine_name(expected));
            Err(unfit(format!("it is for {found}; this machine is {expected}"), BUILD_HERE))
        }
        _ => Ok(()),
    }
}

/// Checks that a file of `length` bytes has `bytes` bytes from `start` on.
fn covers(length: u64, start: u64, bytes: u64) -> Result<(), Unfit> {
    match start.checked_add(bytes) {
        Some(end) if end <= length => Ok(()),
        end => Err(cut_short(end.unwrap_or(u64::MAX), length)),
    }
}

fn machine_name(number: u16) -> String {
    match number {
        EM_X86_64 => "x86_64".into(),
        EM_AARCH64 => "aarch64".into(),
        EM_386 => "x86".into(),
        EM_ARM => "arm".into(),
        EM_PPC64 => "powerpc64".into(),
        EM_S390 => "s390x".into(),
        EM_RISCV => "riscv".into(),
        other => format!("machine number {other}"),
    }
}

fn cut_short(needed: u64, length: u64) -> Unfit {
    let problem =
        format!("it is cut short: found {length} bytes; its headers name at least {needed} bytes");
    unfit(problem, COPY_AGAIN)
}

fn unfit(problem: impl Into<String>, fix: &'static str) -> Unfit {
    Unfit { problem: problem.into(), fix }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A library of this machine that the tests did not build: the C library that they run with.
    fn library() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut path = maps.lines().filter_map(|line| line.split_whitespace().last());
        let path = path.find(|path| path.contains("libc.so") || path.contains("libc-"));
        std::fs::read(path.expect("the C library is mapped")).unwrap()
    }

    fn problem(bytes: &[u8]) -> String {
        judge(bytes).unwrap_err().problem
    }

    /// The library with some bytes of its header replaced.
    fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut library = library();
        library[at..at + bytes.len()].copy_from_slice(bytes);
        library
    }

    #[test]
    fn a_library_of_this_machine_is_fit() {
        assert_eq!(judge(&*library()), Ok(()));
    }

    #[test]
    fn each_way_to_be_no_library_of_this_machine_has_its_own_words() {
        let foreign = if cfg!(target_arch = "x86_64") { EM_AARCH64 } else { EM_X86_64 };
        for (bytes, words) in [
            (Vec::new(), "the file is empty"),
            (b"#!/bin/sh\n".to_vec(), "no ELF file: found \"#!/b\""),
            (with(4, &[ELFCLASS32]), "it is a 32-bit library; expected a 64-bit one"),
            (with(5, &[ELFDATA2MSB]), "it is big-endian; expected a little-endian library"),
            (with(4, &[77]), "found class 77"),
            (with(5, &[77]), "found byte order 77"),
            (with(16, &ET_EXEC.to_ne_bytes()), "it is a program; expected a shared library"),
            (with(16, &ET_REL.to_ne_bytes()), "it is an object file; expected a shared library"),
            (with(16, &ET_CORE.to_ne_bytes()), "it is a core dump"),
            (with(18, &foreign.to_ne_bytes()), &*format!("it is for {}", machine_name(foreign))),
            (with(18, &[0xee, 0xee]), "it is for machine number 61166"),
            (with(54, &[1, 0]), "program headers of 1 bytes"),
            (with(56, &[0, 0]), "found 0 program headers"),
            (with(32, &u64::MAX.to_ne_bytes()), "it is cut short"),
        ] {
            let found = problem(&bytes);
            assert!(found.contains(words), "expected `{words}` in: {found}");
        }
    }

    #[test]
    fn a_segment_behind_the_end_of_the_file_is_found() {
        let library = library();
        let order = Endianness::default();
        let header = (&*library).read_at::<FileHeader64<Endianness>>(0).unwrap();
        let end = header.e_shoff.get(order) as usize;
        // No section table, as in a stripped library: only the segments show that bytes are lost.
        let mut stripped = library[..end].to_vec();
        stripped[40..48].fill(0);
        stripped[60..62].fill(0);
        assert_eq!(judge(&*stripped), Ok(()));
        assert!(problem(&stripped[..end / 2]).contains("it is cut short: found"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn a_library_that_is_cut_anywhere_is_refused_as_cut_short(at in any::<prop::sample::Index>()) {
            let library = library();
            let at = 1 + at.index(library.len() - 1);
            let found = problem(&library[..at]);
            prop_assert!(found.contains("cut short"), "{} bytes: {}", at, found);
        }

        /// Headers lie in the first kilobyte: every judgement ends with a verdict.
        #[test]
        fn damaged_headers_never_crash_the_judge(
            damage in prop::collection::vec((0_usize..1024, any::<u8>()), 1..40),
            cut in 0_usize..4096,
        ) {
            let mut start = library()[..4096].to_vec();
            for (at, byte) in damage {
                start[at] = byte;
            }
            start.truncate(cut);
            let _ = judge(&*start);
        }
    }
}
