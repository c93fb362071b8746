//! The bindings have the layouts, numbers and defaults of NCCL's headers: a C++ program prints those of the headers,
//! and the test compares.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use tokenyard_sys_nccl::{CommProperties, Config, DevCommRequirements, UniqueId, consts};

/// The version whose structures the bindings have; later ones are longer.
const OLDEST: &str = "2.31.2";
const VERSIONS: [&str; 2] = [OLDEST, "2.32.3"];

/// A structure: its names in C, its size, and its fields with offsets, in order.
struct Layout {
    name: &'static str,
    size: usize,
    fields: Vec<(&'static str, usize)>,
}

macro_rules! layout {
    ($type:ident = $name:literal { $($field:ident = $c:literal),+ $(,)? }) => {
        Layout {
            name: $name,
            size: size_of::<$type>(),
            fields: vec![$(($c, offset_of!($type, $field))),+],
        }
    };
}

fn config() -> Layout {
    layout!(Config = "ncclConfig_t" {
        size = "size", magic = "magic", version = "version", blocking = "blocking",
        cga_cluster_size = "cgaClusterSize", min_ctas = "minCTAs", max_ctas = "maxCTAs", net_name = "netName",
        split_share = "splitShare", traffic_class = "trafficClass", comm_name = "commName",
        collnet_enable = "collnetEnable", cta_policy = "CTAPolicy", shrink_share = "shrinkShare",
        nvls_ctas = "nvlsCTAs", n_channels_per_net_peer = "nChannelsPerNetPeer",
        nvlink_centric_sched = "nvlinkCentricSched", graph_usage_mode = "graphUsageMode",
        num_rma_ctx = "numRmaCtx", max_p2p_peers = "maxP2pPeers", graph_stream_ordering = "graphStreamOrdering",
        launch_order_implicit = "launchOrderImplicit", num_rma_sig = "numRmaSig",
        rma_eager_init = "rmaEagerInit", host_cft_mode = "hostCftMode",
    })
}

fn properties() -> Layout {
    layout!(CommProperties = "ncclCommProperties_t" {
        size = "size", magic = "magic", version = "version", rank = "rank", n_ranks = "nRanks",
        cuda_dev = "cudaDev", nvml_dev = "nvmlDev", device_api_support = "deviceApiSupport",
        multimem_support = "multimemSupport", gin_type = "ginType", n_lsa_teams = "nLsaTeams",
        host_rma_support = "hostRmaSupport", railed_gin_type = "railedGinType", comm_hash = "commHash",
        gin_min_stride = "ginMinStride", gin_connection_type = "ginConnectionType", gin_support = "ginSupport",
        dev_comm_runtime_version_size = "devCommRuntimeVersionSize",
    })
}

fn requirements() -> Layout {
    layout!(DevCommRequirements = "ncclDevCommRequirements_t" {
        size = "size", magic = "magic", version = "version",
        resource_requirements_list = "resourceRequirementsList", team_requirements_list = "teamRequirementsList",
        lsa_multimem = "lsaMultimem", barrier_count = "barrierCount", lsa_barrier_count = "lsaBarrierCount",
        rail_gin_barrier_count = "railGinBarrierCount", lsa_ll_a2a_block_count = "lsaLLA2ABlockCount",
        lsa_ll_a2a_slot_count = "lsaLLA2ASlotCount", gin_force_enable = "ginForceEnable",
        gin_context_count = "ginContextCount", gin_signal_count = "ginSignalCount",
        gin_counter_count = "ginCounterCount", gin_connection_type = "ginConnectionType",
        gin_exclusive_contexts = "ginExclusiveContexts", gin_queue_depth = "ginQueueDepth",
        gin_traffic_class = "ginTrafficClass", world_gin_barrier_count = "worldGinBarrierCount",
        gin_strong_signals_required = "ginStrongSignalsRequired",
        gin_va_signals_required = "ginVaSignalsRequired", gin_custom_stride = "ginCustomStride",
        gin_type = "ginType", use_runtime_version = "useRuntimeVersion", cft_caps = "cftCaps",
        cft_barrier_count = "cftBarrierCount",
    })
}

/// Numbers by their names in C.
fn numbers() -> Vec<(&'static str, i64)> {
    vec![
        ("(int)NCCL_API_MAGIC", i64::from(consts::API_MAGIC.cast_signed())),
        ("NCCL_CONFIG_UNDEF_INT", i64::from(consts::UNDEFINED)),
        ("ncclSuccess", i64::from(consts::SUCCESS)),
        ("ncclUnhandledCudaError", i64::from(consts::UNHANDLED_CUDA_ERROR)),
        ("ncclSystemError", i64::from(consts::SYSTEM_ERROR)),
        ("ncclInternalError", i64::from(consts::INTERNAL_ERROR)),
        ("ncclInvalidArgument", i64::from(consts::INVALID_ARGUMENT)),
        ("ncclInvalidUsage", i64::from(consts::INVALID_USAGE)),
        ("ncclRemoteError", i64::from(consts::REMOTE_ERROR)),
        ("ncclInProgress", i64::from(consts::IN_PROGRESS)),
        ("ncclTimeout", i64::from(consts::TIMEOUT)),
        ("NCCL_GIN_TYPE_NONE", i64::from(consts::GIN_TYPE_NONE)),
        ("NCCL_GIN_TYPE_PROXY", i64::from(consts::GIN_TYPE_PROXY)),
        ("NCCL_GIN_TYPE_GDAKI", i64::from(consts::GIN_TYPE_GDAKI)),
        ("NCCL_GIN_TYPE_GPI", i64::from(consts::GIN_TYPE_GPI)),
        ("NCCL_GIN_TYPE_EFA_GDA", i64::from(consts::GIN_TYPE_EFA_GDA)),
        ("NCCL_GIN_CONNECTION_NONE", i64::from(consts::GIN_CONNECTION_NONE)),
        ("NCCL_GIN_CONNECTION_FULL", i64::from(consts::GIN_CONNECTION_FULL)),
        ("NCCL_GIN_CONNECTION_RAIL", i64::from(consts::GIN_CONNECTION_RAIL)),
        ("NCCL_WIN_COLL_SYMMETRIC", i64::from(consts::WIN_COLL_SYMMETRIC)),
    ]
}

/// The bytes of a default value.
fn bytes<T>(value: &T) -> Vec<u8> {
    // SAFETY: read as it is; the bytes between fields are not compared.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

/// A program that prints a line `name value` for each size, offset and number, and each default's bytes.
fn program(layouts: &[(Layout, &str, Vec<u8>)]) -> String {
    let mut text = String::from(
        "#include <cstddef>\n#include <cstdio>\n#include <cuda_runtime.h>\n#include <nccl.h>\n#include <nccl_device.h>\n\
         #define FIELD(t, f) printf(#t \".\" #f \" %zu %zu\\n\", offsetof(t, f), sizeof(((t*)0)->f));\n\
         #define SIZE(t) printf(#t \" %zu\\n\", sizeof(t));\n\
         #define NUMBER(n) printf(#n \" %lld\\n\", (long long)(n));\n\
         #define INITIAL(t, i) { t v = i; printf(#t \"=\"); for (size_t b = 0; b < sizeof v; b++) \
         printf(\" %d\", ((unsigned char*)&v)[b]); puts(\"\"); }\n\
         int main() {\nSIZE(ncclUniqueId)\nNUMBER(NCCL_VERSION_CODE)\n",
    );
    for (layout, initial, _) in layouts {
        text += &format!("SIZE({})\n", layout.name);
        for (field, _) in &layout.fields {
            text += &format!("FIELD({}, {field})\n", layout.name);
        }
        text += &format!("INITIAL({}, {initial})\n", layout.name);
    }
    for (name, _) in numbers() {
        text += &format!("NUMBER({name})\n");
    }
    text + "}\n"
}

/// The output of the program with the headers of a version: values by name.
fn of_headers(version: &str, text: &str) -> BTreeMap<String, Vec<i64>> {
    let headers = std::env::var("NCCL_HEADERS").unwrap_or_else(|_| {
        panic!("NCCL_HEADERS is not set; expected the folder that sys/nccl/headers.py was given")
    });
    let cuda = std::env::var("CUDA_INCLUDE").unwrap_or_else(|_| {
        panic!("CUDA_INCLUDE is not set; expected the folder of cuda_runtime.h")
    });
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("layout.cpp"), folder.path().join("layout"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("g++")
        .args(["-std=c++17", "-w", "-I"])
        .arg(Path::new(&headers).join(version))
        .args(["-I", &cuda, "-o"])
        .args([&program, &source])
        .output()
        .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
    assert!(built.status.success(), "{version}: {}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&program).output().unwrap();
    let line = |line: &str| {
        // Names may have blanks; values are behind the last of the words that are no numbers.
        let values: Vec<i64> = line.split(' ').rev().map_while(|word| word.parse().ok()).collect();
        let name: Vec<&str> = line.split(' ').collect();
        let name = name[..name.len() - values.len()].join(" ");
        (name, values.into_iter().rev().collect())
    };
    String::from_utf8(ran.stdout).unwrap().lines().map(line).collect()
}

#[test]
#[ignore = "needs NCCL's headers: the step cuda-compile fetches them, and runs this"]
fn structures_numbers_and_defaults_are_those_of_both_versions_headers() {
    let layouts = [
        (config(), "NCCL_CONFIG_INITIALIZER", bytes(&Config::default())),
        (properties(), "NCCL_COMM_PROPERTIES_INITIALIZER", bytes(&CommProperties::default())),
        (
            requirements(),
            "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER",
            bytes(&DevCommRequirements::default()),
        ),
    ];
    let text = program(&layouts);
    for version in VERSIONS {
        let found = of_headers(version, &text);
        assert_eq!(found["ncclUniqueId"], [size_of::<UniqueId>() as i64]);
        for (name, number) in numbers() {
            assert_eq!(found[name], [number], "{version}: {name}");
        }
        for (layout, _, default) in &layouts {
            let Layout { name, size, fields } = layout;
            if version == OLDEST {
                assert_eq!(found[*name], [*size as i64], "{version}: size of {name}");
                assert_eq!(found["NCCL_VERSION_CODE"], [i64::from(consts::LEAST_VERSION)]);
            }
            assert!(found[*name][0] >= *size as i64, "{version}: {name} is shorter");
            let theirs = &found[&format!("{name}=")];
            for (field, offset) in fields {
                let whole = &found[&format!("{name}.{field}")];
                assert_eq!(whole[0], *offset as i64, "{version}: {name}.{field}");
                if ["size", "version"].contains(field) {
                    continue;
                }
                let place = *offset..*offset + whole[1] as usize;
                let ours: Vec<i64> = default[place.clone()].iter().map(|b| i64::from(*b)).collect();
                assert_eq!(theirs[place], ours, "{version}: default of {name}.{field}");
            }
        }
    }
}
