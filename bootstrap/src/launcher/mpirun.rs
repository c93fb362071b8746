//! The rendezvous of ranks that mpirun started. mpirun sets the number of ranks on this host, but not the
//! address of rank 0. So ranks that are all on one host meet there without further variables; other ranks
//! need a variable.

use std::path::{Path, PathBuf};

use super::super::identity::{RankId, Rendezvous};
use super::super::secret::{SECRET_FILE_VARIABLE, SECRET_VARIABLE};
use super::{BOOTSTRAP_VARIABLE, Env, Launcher, PORT_VARIABLE, hydra, job_port, master, refuse};
use tokenyard_errors::{Error, Result};

/// The job's name, unique among the Open MPI jobs of its hosts.
const JOB: &str = "PMIX_NAMESPACE";
/// The folder that Open MPI, versions 4 and 5, makes on each host of a job, and removes with the job.
const FOLDER: &str = "PMIX_SERVER_TMPDIR";

pub(super) fn rendezvous(launcher: Launcher, place: RankId, env: &Env<'_>) -> Result<Rendezvous> {
    if env.is_set("MASTER_ADDR") {
        let job = if launcher == Launcher::OpenMpi { env.get(JOB) } else { None };
        let (host, port) = master(env, job.as_deref().map(port_of))?;
        return Ok(Rendezvous::Tcp { host, port });
    }
    if !is_on_one_host(launcher, place, env) {
        return Err(several_hosts(launcher, place, env));
    }
    if env.is_set(PORT_VARIABLE) {
        let port = env.port(PORT_VARIABLE)?;
        return Ok(Rendezvous::Tcp { host: "127.0.0.1".to_owned(), port });
    }
    let path = match launcher {
        Launcher::Hydra => hydra::meeting_file(),
        _ => meeting_file(env),
    };
    path.map(|path| Rendezvous::File { path })
        .map_err(|error| error.with_fix(format!("set {PORT_VARIABLE} to a free port")))
}

/// The variable with the number of ranks on this host.
pub(super) fn local_ranks(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Hydra => "MPI_LOCALNRANKS",
        _ => "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
}

fn is_on_one_host(launcher: Launcher, place: RankId, env: &Env<'_>) -> bool {
    env.get(local_ranks(launcher)).and_then(|count| count.parse().ok()) == Some(place.ranks)
}

fn several_hosts(launcher: Launcher, place: RankId, env: &Env<'_>) -> Error {
    let (name, ranks) = (local_ranks(launcher), place.ranks);
    let here = match env.get(name) {
        Some(count) => format!("{count} of {ranks} ranks are on this host ({name})"),
        None => format!("{name} is not set, so the {ranks} ranks may be on several hosts"),
    };
    let has_secret = env.is_set(SECRET_VARIABLE) || env.is_set(SECRET_FILE_VARIABLE);
    let export = match has_secret {
        true => "",
        false => "export TOKENYARD_SECRET=$(openssl rand -hex 32); ",
    };
    // Hydra passes all variables on, and sets none from which a port could be derived.
    let command = match launcher {
        Launcher::Hydra => {
            format!("mpirun -genv {BOOTSTRAP_VARIABLE} tcp://$(hostname):29600 ...")
        }
        _ if has_secret => "mpirun -x MASTER_ADDR=$(hostname) ...".to_owned(),
        _ => format!("mpirun -x MASTER_ADDR=$(hostname) -x {SECRET_VARIABLE} ..."),
    };
    refuse(format!(
        "MASTER_ADDR is not set, expected the host of rank 0: {here}, and mpirun does not say where \
         rank 0 is"
    ))
    .with_fix(format!("on the host of rank 0: `{export}{command}`"))
}

/// The file in the job's folder of this host.
fn meeting_file(env: &Env<'_>) -> Result<PathBuf> {
    let folder = env.require(FOLDER, "the folder of the job on this host")?;
    let job = env.require(JOB, "the name of the job")?;
    let folder = Path::new(&folder);
    if !(folder.is_absolute() && folder.is_dir()) {
        let message =
            format!("found {FOLDER}={folder:?}, expected a folder that this process sees");
        return Err(refuse(message));
    }
    Ok(folder.join(format!("tokenyard-{}", file_name(&job))))
}

/// Version 5 calls a job `prterun-node1-4242@1`; characters that a file's name cannot hold are removed.
fn file_name(job: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
    job.chars().take(200).map(|c| if is_plain(c) { c } else { '_' }).collect()
}

/// A port for the job, equal on all its hosts.
fn port_of(job: &str) -> u16 {
    // FNV-1a.
    let number = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    job_port(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_s_name_becomes_one_part_of_a_path() {
        assert_eq!(file_name("1084096513"), "1084096513");
        assert_eq!(file_name("prterun-node1.site-4242@1"), "prterun-node1.site-4242@1");
        assert_eq!(file_name("../a b/\n"), ".._a_b__");
    }

    #[test]
    fn neighbouring_jobs_get_other_ports_of_the_range() {
        let names = ["1084096513", "1084162049", "prterun-n1-4242@1", "prterun-n1-4243@1"];
        let ports = names.map(port_of);
        for (i, port) in ports.iter().enumerate() {
            assert!(super::super::JOB_PORTS.contains(&u64::from(*port)));
            assert!(!ports[..i].contains(port), "{ports:?}");
        }
    }
}
