//! The command line of the machine, and the job that it is given.

use std::path::Path;

use anyhow::{Context, Result};

use super::image::Image;

/// QEMU with the host's files, read-only, and the job. Its standard output is that of the job, its
/// standard error the kernel's console.
pub(super) fn command_line(image: &Image, job: &str) -> Result<Vec<String>> {
    let path = |path: &Path| {
        path.to_str().map(String::from).context("start the machine: a path is not UTF-8")
    };
    let (kernel, initramfs) = (path(&image.kernel)?, path(&image.initramfs)?);
    // A comma ends a value unless it is doubled.
    let job = format!("name=opt/org.tokenyard/job,string={}", job.replace(',', ",,"));
    let words = [
        // The machine dies with this process, whatever kills it.
        "setpriv --pdeathsig KILL",
        "qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot",
        "-accel tcg -cpu max -smp 2 -m 3G",
        "-chardev file,id=console,path=/proc/self/fd/2,append=on -serial chardev:console",
        "-chardev file,id=output,path=/proc/self/fd/1,append=on",
        "-device virtio-serial-pci -device virtserialport,chardev=output,name=output",
        "-fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device virtio-9p-pci,fsdev=host,mount_tag=host",
    ];
    let mut words: Vec<String> =
        words.iter().flat_map(|words| words.split(' ')).map(String::from).collect();
    // Panics end the machine; the rest saves time under emulation.
    let kernel_args = "console=ttyS0 quiet panic=-1 oops=panic printk.devkmsg=on mitigations=off \
                       nokaslr nowatchdog";
    words.extend(["-append", kernel_args, "-kernel", &kernel].map(String::from));
    words.extend(["-initrd", &initramfs, "-fw_cfg", &job].map(String::from));
    Ok(words)
}

/// A shell script that runs a command in a folder, with this process's `PATH` and `HOME`.
pub(super) fn job(folder: &Path, command: &[&str]) -> Result<String> {
    let folder = folder.to_str().context("write the job: the folder's path is not UTF-8")?;
    let mut text = String::new();
    for name in ["PATH", "HOME"] {
        if let Ok(value) = std::env::var(name) {
            text += &format!("export {name}={}\n", quoted(&value));
        }
    }
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    text += &format!("cd {} && exec {}\n", quoted(folder), words.join(" "));
    Ok(text)
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_job_runs_the_words_as_they_are_in_the_folder() {
        let words = ["printf", "%s|", "a b", "it's", "$HOME", "a,b", ""];
        let job = job(Path::new("/"), &words).unwrap();
        let out = Command::new("sh").args(["-c", &job]).output().unwrap();
        assert_eq!(String::from_utf8(out.stdout).unwrap(), "a b|it's|$HOME|a,b||");
        let job = super::job(Path::new("/usr"), &["pwd"]).unwrap();
        let out = Command::new("sh").args(["-c", &job]).output().unwrap();
        assert_eq!(out.stdout, b"/usr\n");
    }

    #[test]
    fn the_job_is_one_argument_whose_commas_are_doubled() {
        let image = Image { kernel: "/k".into(), initramfs: "/i i".into() };
        let words = command_line(&image, "echo a, b\n").unwrap();
        let after = |option: &str| {
            let at = words.iter().position(|word| word == option).unwrap();
            words[at + 1].as_str()
        };
        assert_eq!(after("-fw_cfg"), "name=opt/org.tokenyard/job,string=echo a,, b\n");
        assert_eq!((after("-kernel"), after("-initrd")), ("/k", "/i i"));
        assert!(words.iter().any(|word| word.contains("readonly=on")));
    }
}
