//! The command line of the machine, and its job.

use std::path::Path;

use anyhow::{Context, Result};

use super::image::Image;

/// The task of the machine.
pub(super) struct Task<'a> {
    /// The folder in which the command runs.
    pub(super) folder: &'a Path,
    /// The one folder of the host that the command can write to.
    pub(super) results: &'a Path,
    pub(super) command: &'a [&'a str],
}

/// QEMU with the job and with the host's files, read-only except the results. Its standard output is that
/// of the job; its standard error is the kernel's console.
pub(super) fn command_line(image: &Image, task: &Task<'_>) -> Result<Vec<String>> {
    let (kernel, initramfs) = (text(&image.kernel)?, text(&image.initramfs)?);
    // A comma ends a value unless it is doubled.
    let job = format!("name=opt/org.tokenyard/job,string={}", job(task)?.replace(',', ",,"));
    let results = text(task.results)?.replace(',', ",,");
    let results = format!("local,id=results,path={results},security_model=none");
    let words = [
        // The machine ends with this process, whatever kills the process.
        "setpriv --pdeathsig KILL",
        "qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot",
        // Without erms: QEMU executes `rep movsb` byte by byte, and rxe copies with it where it may. 8-byte
        // values would then tear as they do on no NIC (INV-3).
        "-accel tcg -cpu max,-erms -smp 2 -m 6G",
        "-chardev file,id=console,path=/proc/self/fd/2,append=on -serial chardev:console",
        "-chardev file,id=output,path=/proc/self/fd/1,append=on",
        "-device virtio-serial-pci -device virtserialport,chardev=output,name=output",
        "-fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device virtio-9p-pci,fsdev=host,mount_tag=host",
        "-device virtio-9p-pci,fsdev=results,mount_tag=results",
    ];
    let mut words: Vec<String> =
        words.iter().flat_map(|words| words.split(' ')).map(String::from).collect();
    // Panics end the machine; the rest saves time under emulation.
    let kernel_args = "console=ttyS0 quiet panic=-1 oops=panic printk.devkmsg=on mitigations=off \
                       nokaslr nowatchdog";
    let files = ["-kernel", kernel, "-initrd", initramfs, "-fsdev", &results, "-fw_cfg", &job];
    words.extend(["-append", kernel_args].into_iter().chain(files).map(String::from));
    Ok(words)
}

/// A shell script that runs the command in its folder, with this process's `PATH` and `HOME`.
fn job(task: &Task<'_>) -> Result<String> {
    let mut script = String::from("set -e\n");
    for name in ["PATH", "HOME"] {
        if let Ok(value) = std::env::var(name) {
            script += &format!("export {name}={}\n", quoted(&value));
        }
    }
    let (results, folder) = (quoted(text(task.results)?), quoted(text(task.folder)?));
    let words: Vec<String> = task.command.iter().map(|word| quoted(word)).collect();
    script += &format!("mount -t 9p -o trans=virtio,version=9p2000.L results {results}\n");
    script += &format!("cd {folder}\nexec {}\n", words.join(" "));
    Ok(script)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("start the machine: {} is not UTF-8", path.display()))
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn task<'a>(folder: &'a str, command: &'a [&'a str]) -> Task<'a> {
        Task { folder: Path::new(folder), results: Path::new("/r, s"), command }
    }

    /// Runs the job here, where there are no file systems to mount.
    fn output(task: &Task<'_>) -> String {
        let script = format!("mount() {{ :; }}\n{}", job(task).unwrap());
        String::from_utf8(Command::new("sh").args(["-c", &script]).output().unwrap().stdout)
            .unwrap()
    }

    #[test]
    fn the_job_runs_the_words_as_they_are_in_the_folder() {
        let words = ["printf", "%s|", "a b", "it's", "$HOME", "a,b", ""];
        assert_eq!(output(&task("/", &words)), "a b|it's|$HOME|a,b||");
        assert_eq!(output(&task("/usr", &["pwd"])), "/usr\n");
    }

    #[test]
    fn the_command_does_not_run_where_its_results_would_be_lost() {
        let script =
            format!("mount() {{ false; }}\n{}", job(&task("/", &["echo", "run"])).unwrap());
        let out = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(!out.status.success());
        assert!(out.stdout.is_empty());
    }

    #[test]
    fn the_job_and_the_results_are_one_argument_each_with_doubled_commas() {
        let image = Image { kernel: "/k".into(), initramfs: "/i i".into() };
        let words = command_line(&image, &task("/", &["echo", "a, b"])).unwrap();
        let after = |option: &str| {
            let at = words.iter().rposition(|word| word == option).unwrap();
            words[at + 1].as_str()
        };
        assert!(after("-fw_cfg").starts_with("name=opt/org.tokenyard/job,string=set -e\n"));
        assert!(after("-fw_cfg").ends_with("exec 'echo' 'a,, b'\n"));
        assert_eq!(after("-fsdev"), "local,id=results,path=/r,, s,security_model=none");
        assert_eq!((after("-kernel"), after("-initrd")), ("/k", "/i i"));
        assert!(words.iter().any(|word| word.contains("path=/,") && word.contains("readonly=on")));
    }
}
