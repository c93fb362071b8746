use super::super::identity::Identity;
use super::*;

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "16"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node-7"),
    ("MASTER_PORT", "29500"),
];
const SLURM: &[(&str, &str)] = &[
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "3"),
    ("SLURM_STEP_NODELIST", "gpu[003-007,9],login1"),
    ("SLURM_JOB_NODELIST", "other[1-9]"),
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "0"),
];
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
];
const HYDRA: &[(&str, &str)] =
    &[("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1")];
/// A variable that torchrun sets in addition.
const ELASTIC: &[(&str, &str)] = &[("TORCHELASTIC_RUN_ID", "none")];
const OWN: &[(&str, &str)] =
    &[("TOKENYARD_RANK", "1"), ("TOKENYARD_RANKS", "2"), ("TOKENYARD_LOCAL_RANK", "1")];

/// Resolves with the variables of `sets`; a later set wins, an empty variable is unset.
fn resolve(spec: &str, sets: &[&[(&str, &str)]]) -> Result<Identity> {
    let lookup = |name: &str| {
        let all = sets.iter().rev().flat_map(|set| set.iter().rev());
        all.into_iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    };
    Identity::resolve(spec, &lookup)
}

fn resolved(spec: &str, sets: &[&[(&str, &str)]]) -> ((u32, u32, u32), String, String) {
    let Identity { place, rendezvous, source, .. } = resolve(spec, sets).unwrap();
    ((place.rank, place.ranks, place.local_rank), rendezvous.to_string(), source)
}

fn refused(spec: &str, sets: &[&[(&str, &str)]]) -> String {
    let error = resolve(spec, sets).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    error.to_string()
}

#[test]
fn torchrun_gives_all_and_the_port_after_its_own() {
    let (place, at, source) = resolved("env", &[TORCHRUN]);
    assert_eq!((place, at.as_str()), ((5, 16, 1), "tcp://node-7:29501"));
    assert_eq!(source, "torchrun");
    let (_, at, _) = resolved("env", &[TORCHRUN, &[("TOKENYARD_PORT", "7000")]]);
    assert_eq!(at, "tcp://node-7:7000");
}

#[test]
fn an_address_in_the_brackets_of_a_url_is_the_address() {
    let at = |master| resolved("env", &[TORCHRUN, &[("MASTER_ADDR", master)]]).1;
    assert_eq!(at("[::1]"), at("::1"));
    assert_eq!(at("[fe80::1%eth0]"), "tcp://[fe80::1%eth0]:29501");
}

#[test]
fn a_launcher_states_whether_it_has_ranks_on_several_hosts() {
    let bootstrap: &[(&str, &str)] = &[("TOKENYARD_BOOTSTRAP", "tcp://h:1")];
    for (launcher, one, several) in [
        (TORCHRUN, ("LOCAL_WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8")),
        (SLURM, ("SLURM_NNODES", "1"), ("SLURM_NNODES", "2")),
        (OPEN_MPI, ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")),
        (HYDRA, ("MPI_LOCALNRANKS", "4"), ("MPI_LOCALNRANKS", "2")),
    ] {
        let spans = |name, value| {
            let set = &[(name, value)];
            resolve("env", &[launcher, bootstrap, set]).unwrap().others
        };
        assert_eq!(spans(one.0, one.1), OtherHosts::NotStated);
        assert_eq!(spans(several.0, several.1), OtherHosts::Stated, "{several:?}");
        assert_eq!(spans(one.0, ""), OtherHosts::NotStated);
    }
    // tokenyard's own variables say nothing of hosts. A launcher's do, if they are about the same ranks.
    let own = |ranks| {
        let several = &[("LOCAL_WORLD_SIZE", "8")];
        let ranks = &[("TOKENYARD_RANKS", ranks)];
        resolve("env", &[TORCHRUN, several, OWN, ranks, bootstrap]).unwrap().others
    };
    assert_eq!((own("16"), own("2")), (OtherHosts::Stated, OtherHosts::Unknown));
    let alone = |spec| resolve(spec, &[OWN]).unwrap().others;
    assert_eq!(alone("tcp://h:1"), OtherHosts::Unknown);
}

#[test]
fn a_process_has_an_index_on_its_machine_whatever_the_world_that_it_joins() {
    let index = |sets: &[&[(&str, &str)]]| {
        let all: Vec<_> = sets.iter().flat_map(|set| set.iter().copied()).collect();
        local_rank_of_environment(&|name| {
            all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    };
    assert_eq!(
        [TORCHRUN, SLURM, OPEN_MPI, HYDRA, OWN].map(|set| index(&[set])),
        [1, 3, 0, 1, 1].map(Some)
    );
    assert_eq!((index(&[SLURM, TORCHRUN]), index(&[])), (Some(1), None));
}

#[test]
fn slurm_gives_the_first_host_of_the_step_and_a_port_of_the_job() {
    let (place, at, source) = resolved("env", &[SLURM]);
    assert_eq!((place, source.as_str()), ((3, 8, 3), "Slurm"));
    let port: u64 = at.strip_prefix("tcp://gpu003:").unwrap().parse().unwrap();
    assert!(JOB_PORTS.contains(&port));
    assert_eq!(resolved("env", &[SLURM]).1, at);
    assert_ne!(resolved("env", &[SLURM, &[("SLURM_STEP_ID", "1")]]).1, at);
    assert_ne!(resolved("env", &[SLURM, &[("SLURM_JOB_ID", "123457")]]).1, at);
    let given = resolved("env", &[SLURM, &[("TOKENYARD_PORT", "7000")]]);
    assert_eq!(given.1, "tcp://gpu003:7000");
    let of_job = resolved("env", &[SLURM, &[("SLURM_STEP_NODELIST", "")]]);
    assert!(of_job.1.starts_with("tcp://other1:"));
}

#[test]
fn open_mpi_needs_the_address_of_rank_0() {
    let text = refused("env", &[OPEN_MPI]);
    assert!(text.contains("MASTER_ADDR is not set") && text.contains("Open MPI"), "{text}");
    assert!(text.contains("set TOKENYARD_BOOTSTRAP=tcp://"), "{text}");
    let master = &[("MASTER_ADDR", "n0"), ("TOKENYARD_PORT", "7000")];
    let (place, at, source) = resolved("env", &[OPEN_MPI, master]);
    assert_eq!((place, at.as_str()), ((2, 4, 0), "tcp://n0:7000"));
    assert_eq!(source, "Open MPI");
    let given = resolved("env", &[OPEN_MPI, &[("TOKENYARD_BOOTSTRAP", "file:///s/job")]]);
    assert_eq!((given.0, given.1.as_str()), ((2, 4, 0), "file:///s/job"));
}

#[test]
fn the_launchers_are_asked_in_order() {
    assert_eq!(resolved("env", &[SLURM, TORCHRUN]).2, "torchrun");
    assert_eq!(resolved("env", &[SLURM, TORCHRUN, ELASTIC, OPEN_MPI, HYDRA]).2, "torchrun");
    let bootstrap = &[("TOKENYARD_BOOTSTRAP", "tcp://h:1")];
    let (place, at, source) = resolved("env", &[TORCHRUN, bootstrap]);
    assert_eq!((place.0, at.as_str()), (5, "tcp://h:1"));
    assert_eq!(source, "tcp://h:1, ranks from torchrun");
    assert_eq!(resolved("env", &[TORCHRUN, OWN, bootstrap]).0, (1, 2, 1));
}

#[test]
fn under_mpirun_the_ids_of_slurm_are_those_of_its_daemons() {
    let master = &[("MASTER_ADDR", "n0"), ("TOKENYARD_PORT", "7000")];
    assert_eq!(resolved("env", &[SLURM, OPEN_MPI, master]).2, "Open MPI");
    let same = &[
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "8"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
    ];
    // Rank 0 of mpirun in a batch script has the ids of the script.
    assert_eq!(resolved("env", &[SLURM, same, master]).2, "Open MPI");
    assert_eq!(resolved("env", &[SLURM, HYDRA, &[("MASTER_PORT", "1")], master]).2, "Hydra");
    // `srun --mpi=pmi2` sets these, and nothing else of Hydra.
    let pmi2 = &[("PMI_RANK", "3"), ("PMI_SIZE", "8")];
    assert_eq!(resolved("env", &[SLURM, pmi2]).2, "Slurm");
}

#[test]
fn a_given_address_takes_the_ranks_from_the_first_who_knows() {
    for (sets, rank, from) in [
        (&[OWN][..], 1, "TOKENYARD_RANK"),
        (&[TORCHRUN, OWN], 1, "TOKENYARD_RANK"),
        (&[TORCHRUN], 5, "torchrun"),
        (&[SLURM], 3, "Slurm"),
        (&[OPEN_MPI], 2, "Open MPI"),
        (&[HYDRA], 3, "Hydra"),
    ] {
        let (place, at, source) = resolved("tcp://h:1", sets);
        assert_eq!((place.0, at.as_str()), (rank, "tcp://h:1"));
        assert_eq!(source, format!("tcp://h:1, ranks from {from}"));
    }
}

#[test]
fn every_missing_variable_is_named_with_what_it_should_hold() {
    for (set, names) in [
        (TORCHRUN, &["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"][..]),
        (SLURM, &["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]),
        (OPEN_MPI, &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
        (HYDRA, &["PMI_SIZE"]),
    ] {
        for name in names {
            let text = refused("env", &[set, &[(name, "")]]);
            assert!(
                text.contains(&format!("{name} is not set, expected the"))
                    || *name == "MASTER_PORT",
                "{text}"
            );
            assert!(text.contains(name), "{text}");
        }
    }
    for name in ["TOKENYARD_RANK", "TOKENYARD_RANKS", "TOKENYARD_LOCAL_RANK"] {
        let text = refused("tcp://h:1", &[OWN, &[(name, "")]]);
        assert!(text.contains(&format!("{name} is not set")), "{text}");
    }
    let no_hosts: &[(&str, &str)] = &[("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "")];
    assert!(refused("env", &[SLURM, no_hosts]).contains("SLURM_JOB_NODELIST is not set"));
    assert!(
        refused("env", &[SLURM, &[("SLURM_STEP_ID", "")]]).contains("SLURM_STEP_ID is not set")
    );
}

#[test]
fn every_malformed_variable_is_named_with_its_value() {
    for (set, name, value) in [
        (TORCHRUN, "RANK", "one"),
        (TORCHRUN, "WORLD_SIZE", "-4"),
        (TORCHRUN, "MASTER_PORT", "99999"),
        (TORCHRUN, "TOKENYARD_PORT", "0"),
        (SLURM, "SLURM_PROCID", "0x1"),
        (SLURM, "SLURM_JOB_ID", "12_1"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "2.0"),
        (HYDRA, "MPI_LOCALRANKID", "first"),
    ] {
        let text = refused("env", &[set, &[(name, value)]]);
        assert!(text.contains(&format!("found {name}={value:?}, expected")), "{text}");
    }
    let list = refused("env", &[SLURM, &[("SLURM_STEP_NODELIST", "gpu[3-")]]);
    assert!(list.contains("unclosed") && list.contains("SLURM_STEP_NODELIST"), "{list}");
    let spec = refused("env", &[OWN, &[("TOKENYARD_BOOTSTRAP", "env")]]);
    assert!(spec.contains("TOKENYARD_BOOTSTRAP") && spec.contains("neither"), "{spec}");
    let outside = refused("env", &[TORCHRUN, &[("RANK", "16")]]);
    assert!(outside.contains("rank 16 of 16") && outside.contains("WORLD_SIZE"), "{outside}");
    assert!(refused("env", &[TORCHRUN, &[("MASTER_PORT", "65535")]]).contains("65534"));
}

#[test]
fn without_a_launcher_all_that_were_looked_for_are_named() {
    let text = refused("env", &[]);
    for name in ["TOKENYARD_BOOTSTRAP", "torchrun", "Slurm", "Open MPI", "RANK unset"] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(refused("tcp://h:1", &[]).contains("TOKENYARD_RANKS"));
    let pmix = refused("env", &[&[("PMIX_RANK", "1")]]);
    assert!(pmix.contains("PMIX_RANK is set, which does not say how many ranks"), "{pmix}");
}

#[test]
fn ranks_of_open_mpi_on_one_host_meet_in_the_folder_of_their_job() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let here: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_SERVER_TMPDIR", folder),
        ("PMIX_NAMESPACE", "prterun-n1-4242@1"),
    ];
    let (place, at, source) = resolved("env", &[OPEN_MPI, here]);
    assert_eq!((place, source.as_str()), ((2, 4, 0), "Open MPI"));
    assert_eq!(at, format!("file://{folder}/tokenyard-prterun-n1-4242@1"));
    let other = resolved("env", &[OPEN_MPI, here, &[("PMIX_NAMESPACE", "prterun-n1-4242@2")]]);
    assert_ne!(other.1, at);
    // An explicit setting wins.
    let port = resolved("env", &[OPEN_MPI, here, &[("TOKENYARD_PORT", "7000")]]);
    assert_eq!(port.1, "tcp://127.0.0.1:7000");
    let master = resolved("env", &[OPEN_MPI, here, &[("MASTER_ADDR", "n0")]]);
    assert!(master.1.starts_with("tcp://n0:"), "{}", master.1);
}

#[test]
fn a_folder_of_the_job_that_is_not_here_is_named_with_its_variable() {
    let here = &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4"), ("PMIX_NAMESPACE", "7")];
    let text = refused("env", &[OPEN_MPI, here]);
    assert!(text.contains("PMIX_SERVER_TMPDIR is not set"), "{text}");
    for value in ["/no/such/folder", "relative"] {
        let text = refused("env", &[OPEN_MPI, here, &[("PMIX_SERVER_TMPDIR", value)]]);
        assert!(text.contains(&format!("PMIX_SERVER_TMPDIR={value:?}")), "{text}");
        assert!(text.contains("set TOKENYARD_PORT to a free port"), "{text}");
    }
    // No process of Hydra is above this test.
    let text = refused("env", &[HYDRA, &[("MPI_LOCALNRANKS", "4")]]);
    assert!(text.contains("ends in pmi_proxy") && text.contains("Hydra"), "{text}");
}

#[test]
fn ranks_of_mpirun_on_several_hosts_are_refused_with_the_command_that_works() {
    let here = &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), ("PMIX_NAMESPACE", "7")];
    let text = refused("env", &[OPEN_MPI, here]);
    assert!(text.contains("2 of 4 ranks are on this host"), "{text}");
    let export = "export TOKENYARD_SECRET=$(openssl rand -hex 32); ";
    let command = format!("`{export}mpirun -x MASTER_ADDR=$(hostname) -x TOKENYARD_SECRET ...`");
    assert!(text.contains(&command), "{text}");
    let secret = &[("TOKENYARD_SECRET_FILE", "/s")];
    let text = refused("env", &[OPEN_MPI, here, secret]);
    assert!(text.contains("`mpirun -x MASTER_ADDR=$(hostname) ...`"), "{text}");
    // That is enough: the port is the job's, the same on all hosts.
    let at = |job| {
        let set: &[_] = &[("MASTER_ADDR", "n0"), ("PMIX_NAMESPACE", job)];
        resolved("env", &[OPEN_MPI, here, set]).1
    };
    assert_eq!(at("1084096513"), at("1084096513"));
    assert_ne!(at("1084096513"), at("1084162049"));

    let text = refused("env", &[HYDRA, secret]);
    assert!(text.contains("MASTER_ADDR is not set") && text.contains("2 of 4 ranks"), "{text}");
    let command = "`mpirun -genv TOKENYARD_BOOTSTRAP tcp://$(hostname):29600 ...`";
    assert!(text.contains(command), "{text}");
    let text = refused("env", &[HYDRA, &[("MASTER_ADDR", "n0")]]);
    assert!(text.contains("MASTER_PORT is not set"), "{text}");
}

#[test]
fn launchers_that_contradict_each_other_are_refused_and_both_are_named() {
    let text = refused("env", &[TORCHRUN, OPEN_MPI]);
    assert!(text.contains("RANK=5, WORLD_SIZE=16 (torchrun)"), "{text}");
    assert!(text.contains("OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=4 (Open MPI)"), "{text}");
    assert!(text.contains("`env -u RANK -u WORLD_SIZE -u LOCAL_RANK`"), "{text}");
    let text = refused("tcp://h:1", &[OPEN_MPI, HYDRA]);
    assert!(text.contains("PMI_RANK=3, PMI_SIZE=4 (Hydra)"), "{text}");
    // One differing number is a contradiction; equal numbers are none.
    for (name, value) in [("RANK", "1"), ("WORLD_SIZE", "3")] {
        let same = &[("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")];
        assert_eq!(resolved("tcp://h:1", &[OPEN_MPI, same]).0, (2, 4, 0));
        let text = refused("tcp://h:1", &[OPEN_MPI, same, &[(name, value)]]);
        assert!(text.contains("contradict"), "{text}");
    }
    // tokenyard's own variables decide.
    assert_eq!(resolved("tcp://h:1", &[TORCHRUN, OPEN_MPI, OWN]).0, (1, 2, 1));
}

#[test]
fn a_rank_of_mpirun_knows_that_it_is_one() {
    let is_rank = |sets: &[&[(&str, &str)]]| {
        let all: Vec<_> = sets.iter().flat_map(|set| set.iter().copied()).collect();
        is_rank_of_mpirun(&|name| {
            all.iter().rev().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    };
    assert!(is_rank(&[OPEN_MPI]) && is_rank(&[HYDRA]) && is_rank(&[SLURM, OPEN_MPI]));
    assert!(!is_rank(&[]) && !is_rank(&[SLURM]) && !is_rank(&[TORCHRUN]));
    assert!(!is_rank(&[TORCHRUN, ELASTIC, OPEN_MPI]));
    assert!(!is_rank(&[OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "1")]]));
}
