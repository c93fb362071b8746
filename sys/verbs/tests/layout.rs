//! The bindings agree with the installed header in sizes, offsets and constants, as a C compiler
//! computes them. The test needs gcc and libibverbs-dev.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use tokenyard_sys_verbs::ffi;

/// An expression of C, and its value in Rust.
type Pair = (String, u64);

/// `sizeof` of a structure, and `offsetof` of fields: `Rust = "C": field "c_field", ...`.
macro_rules! layout {
    ($($name:ident = $c:literal: $($field:ident $c_field:literal),*;)*) => {{
        let mut all: Vec<Pair> = Vec::new();
        $(
            $(all.push((
                format!("offsetof({}, {})", $c, $c_field),
                offset_of!(ffi::$name, $field) as u64,
            ));)*
        )*
        all
    }};
}

macro_rules! sizes {
    ($($name:ident = $c:literal),* $(,)?) => {
        vec![$((format!("sizeof({})", $c), size_of::<ffi::$name>() as u64)),*]
    };
}

macro_rules! constants {
    ($($name:ident)*) => {
        vec![$((concat!("IBV_", stringify!($name)).to_owned(), ffi::$name as u64)),*]
    };
}

fn pairs() -> Vec<Pair> {
    let mut all: Vec<Pair> = sizes! {
        Gid = "union ibv_gid", GidEntry = "struct ibv_gid_entry",
        DeviceAttr = "struct ibv_device_attr", PortAttr = "struct ibv_port_attr",
        RawPd = "struct ibv_pd", RawMr = "struct ibv_mr", ContextOps = "struct ibv_context_ops",
        Wc = "struct ibv_wc", Sge = "struct ibv_sge", SendWr = "struct ibv_send_wr",
        RecvWr = "struct ibv_recv_wr", QpCap = "struct ibv_qp_cap",
        QpInitAttr = "struct ibv_qp_init_attr", GlobalRoute = "struct ibv_global_route",
        AhAttr = "struct ibv_ah_attr", QpAttr = "struct ibv_qp_attr",
        SrqAttr = "struct ibv_srq_attr", SrqInitAttr = "struct ibv_srq_init_attr",
        AsyncEvent = "struct ibv_async_event",
    };
    all.extend(layout! {
        GidEntry = "struct ibv_gid_entry": gid "gid", gid_index "gid_index",
            port_num "port_num", gid_type "gid_type", ndev_ifindex "ndev_ifindex";
        DeviceAttr = "struct ibv_device_attr": max_qp "max_qp", max_qp_wr "max_qp_wr",
            max_cqe "max_cqe", max_qp_rd_atom "max_qp_rd_atom", max_srq "max_srq",
            max_qp_init_rd_atom "max_qp_init_rd_atom", atomic_cap "atomic_cap",
            max_srq_wr "max_srq_wr", phys_port_cnt "phys_port_cnt";
        PortAttr = "struct ibv_port_attr": active_mtu "active_mtu", gid_tbl_len "gid_tbl_len",
            max_msg_sz "max_msg_sz", lid "lid", active_width "active_width",
            active_speed "active_speed", link_layer "link_layer",
            port_cap_flags2 "port_cap_flags2";
        RawMr = "struct ibv_mr": lkey "lkey", rkey "rkey";
        RawCq = "struct ibv_cq": context "context";
        RawSrq = "struct ibv_srq": context "context";
        RawQp = "struct ibv_qp": context "context", srq "srq", qp_num "qp_num";
        RawContext = "struct ibv_context": ops "ops", cmd_fd "cmd_fd", async_fd "async_fd";
        ContextOps = "struct ibv_context_ops": poll_cq "poll_cq",
            post_srq_recv "post_srq_recv", post_send "post_send";
        Wc = "struct ibv_wc": status "status", opcode "opcode", vendor_err "vendor_err",
            imm_data "imm_data", qp_num "qp_num", wc_flags "wc_flags",
            dlid_path_bits "dlid_path_bits";
        Sge = "struct ibv_sge": length "length", lkey "lkey";
        SendWr = "struct ibv_send_wr": next "next", sg_list "sg_list", num_sge "num_sge",
            opcode "opcode", send_flags "send_flags", imm_data "imm_data", wr "wr";
        RecvWr = "struct ibv_recv_wr": next "next", sg_list "sg_list", num_sge "num_sge";
        QpInitAttr = "struct ibv_qp_init_attr": srq "srq", cap "cap", qp_type "qp_type",
            sq_sig_all "sq_sig_all";
        AhAttr = "struct ibv_ah_attr": dlid "dlid", sl "sl", is_global "is_global",
            port_num "port_num";
        GlobalRoute = "struct ibv_global_route": sgid_index "sgid_index",
            hop_limit "hop_limit", traffic_class "traffic_class";
        QpAttr = "struct ibv_qp_attr": path_mtu "path_mtu", rq_psn "rq_psn",
            dest_qp_num "dest_qp_num", qp_access_flags "qp_access_flags", ah_attr "ah_attr",
            pkey_index "pkey_index", max_rd_atomic "max_rd_atomic",
            min_rnr_timer "min_rnr_timer", port_num "port_num", timeout "timeout",
            retry_cnt "retry_cnt", rnr_retry "rnr_retry", rate_limit "rate_limit";
        AsyncEvent = "struct ibv_async_event": event_type "event_type";
    });
    let send = [
        ("wr.rdma.remote_addr", offset_of!(ffi::WrRdma, remote_addr)),
        ("wr.rdma.rkey", offset_of!(ffi::WrRdma, rkey)),
        ("wr.atomic.remote_addr", offset_of!(ffi::WrAtomic, remote_addr)),
        ("wr.atomic.compare_add", offset_of!(ffi::WrAtomic, compare_add)),
        ("wr.atomic.rkey", offset_of!(ffi::WrAtomic, rkey)),
    ];
    all.extend(send.map(|(field, at)| {
        let at = offset_of!(ffi::SendWr, wr) + at;
        (format!("offsetof(struct ibv_send_wr, {field})"), at as u64)
    }));
    all.extend(constants! {
        PORT_ACTIVE LINK_LAYER_INFINIBAND LINK_LAYER_ETHERNET
        GID_TYPE_IB GID_TYPE_ROCE_V1 GID_TYPE_ROCE_V2 ATOMIC_NONE
        ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ ACCESS_REMOTE_ATOMIC
        QPT_RC QPS_RESET QPS_INIT QPS_RTR QPS_RTS QPS_ERR
        QP_STATE QP_ACCESS_FLAGS QP_PKEY_INDEX QP_PORT QP_AV QP_PATH_MTU QP_TIMEOUT QP_RETRY_CNT
        QP_RNR_RETRY QP_RQ_PSN QP_MAX_QP_RD_ATOMIC QP_MIN_RNR_TIMER QP_SQ_PSN
        QP_MAX_DEST_RD_ATOMIC QP_DEST_QPN
        WR_RDMA_WRITE WR_RDMA_WRITE_WITH_IMM WR_RDMA_READ WR_ATOMIC_FETCH_AND_ADD
        SEND_SIGNALED SEND_INLINE
        WC_SUCCESS WC_LOC_LEN_ERR WC_LOC_QP_OP_ERR WC_LOC_PROT_ERR WC_WR_FLUSH_ERR
        WC_BAD_RESP_ERR WC_REM_INV_REQ_ERR WC_REM_ACCESS_ERR WC_REM_OP_ERR WC_RETRY_EXC_ERR
        WC_RNR_RETRY_EXC_ERR WC_FATAL_ERR WC_RECV_RDMA_WITH_IMM
        EVENT_CQ_ERR EVENT_QP_FATAL EVENT_QP_REQ_ERR EVENT_QP_ACCESS_ERR EVENT_DEVICE_FATAL
        EVENT_SRQ_ERR EVENT_QP_LAST_WQE_REACHED EVENT_PORT_ERR
    });
    all
}

/// The values of the C compiler.
fn header_values(pairs: &[Pair]) -> BTreeMap<String, u64> {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    for (expression, _) in pairs {
        writeln!(program, "printf(\"%llu {expression}\\n\", (unsigned long long)({expression}));")
            .unwrap();
    }
    program.push_str("return 0; }\n");
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("gcc")
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output()
        .expect("gcc not found: apt-get install gcc");
    let printed = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "apt-get install libibverbs-dev, if it is that: {printed}");
    let output = Command::new(&binary).output().unwrap();
    let line = |line: &str| {
        let (value, expression) = line.split_once(' ').unwrap();
        (expression.to_owned(), value.parse().unwrap())
    };
    String::from_utf8(output.stdout).unwrap().lines().map(line).collect()
}

#[test]
fn structures_and_constants_are_those_of_the_header() {
    let pairs = pairs();
    let header = header_values(&pairs);
    for (expression, ours) in &pairs {
        assert_eq!(Some(ours), header.get(expression), "{expression}");
    }
    assert!(pairs.len() > 130, "{} values were compared", pairs.len());
}
