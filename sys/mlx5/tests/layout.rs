//! The bindings agree with the header of the machine: sizes, offsets and constants, as a C compiler
//! sees them. Needs gcc and libibverbs-dev.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use tokenyard_sys_mlx5::cqe::{Kind, layout as cqe, syndrome};
use tokenyard_sys_mlx5::wqe::{self, flags, layout, opcode};
use tokenyard_sys_mlx5::{doorbell, ffi};

/// An expression of C, and the value that Rust has for it.
type Pair = (String, u64);

/// `sizeof` of a structure, and `offsetof` of fields: `Rust = "C": field "c_field", ...`.
macro_rules! layout {
    ($($name:ident = $c:literal: $($field:ident $c_field:literal),*;)*) => {{
        let mut all: Vec<Pair> = Vec::new();
        $(
            all.push((format!("sizeof(struct {})", $c), size_of::<ffi::$name>() as u64));
            $(all.push((
                format!("offsetof(struct {}, {})", $c, $c_field),
                offset_of!(ffi::$name, $field) as u64,
            ));)*
        )*
        all
    }};
}

fn structures() -> Vec<Pair> {
    layout! {
        ContextAttr = "mlx5dv_context_attr": flags "flags", comp_mask "comp_mask";
        DevxUar = "mlx5dv_devx_uar": reg_addr "reg_addr", base_addr "base_addr",
            page_id "page_id", mmap_off "mmap_off", comp_mask "comp_mask";
        DevxUmem = "mlx5dv_devx_umem": umem_id "umem_id";
        DevxUmemIn = "mlx5dv_devx_umem_in": addr "addr", size "size", access "access",
            pgsz_bitmap "pgsz_bitmap", comp_mask "comp_mask", dmabuf_fd "dmabuf_fd";
        Pd = "mlx5dv_pd": pdn "pdn", comp_mask "comp_mask";
        Ah = "mlx5dv_ah": av "av", comp_mask "comp_mask";
        Av = "mlx5_wqe_av": key "key", dqp_dct "dqp_dct", stat_rate_sl "stat_rate_sl",
            fl_mlid "fl_mlid", rlid "rlid", reserved0 "reserved0", rmac "rmac", tclass "tclass",
            hop_limit "hop_limit", grh_gid_fl "grh_gid_fl", rgid "rgid";
        Qp = "mlx5dv_qp": dbrec "dbrec", sq "sq", rq "rq", bf "bf", comp_mask "comp_mask",
            uar_mmap_offset "uar_mmap_offset", tirn "tirn", sqn "sqn", tir_icm_addr "tir_icm_addr";
        Cq = "mlx5dv_cq": buf "buf", dbrec "dbrec", cqe_cnt "cqe_cnt", cqe_size "cqe_size",
            cq_uar "cq_uar", cqn "cqn", comp_mask "comp_mask";
        Obj = "mlx5dv_obj": qp "qp", cq "cq", srq "srq", rwq "rwq", dm "dm", ah "ah", pd "pd";
    }
}

/// Names of C, and values of Rust.
macro_rules! values {
    ($($c:literal $value:expr,)*) => { vec![$(($c.to_owned(), u64::from($value))),*] };
}

fn constants() -> Vec<Pair> {
    values! {
        "MLX5DV_CONTEXT_FLAGS_DEVX" ffi::CONTEXT_FLAGS_DEVX,
        "MLX5DV_OBJ_AH" ffi::OBJ_AH,
        "MLX5DV_OBJ_PD" ffi::OBJ_PD,
        "MLX5DV_UMEM_MASK_DMABUF" ffi::UMEM_MASK_DMABUF,
        "MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF" ffi::UAR_ALLOC_TYPE_BF,
        "MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC" ffi::UAR_ALLOC_TYPE_NC,
        "MLX5_OPCODE_NOP" opcode::NOP,
        "MLX5_OPCODE_RDMA_WRITE" opcode::RDMA_WRITE,
        "MLX5_OPCODE_RDMA_WRITE_IMM" opcode::RDMA_WRITE_IMM,
        "MLX5_OPCODE_SEND" opcode::SEND,
        "MLX5_OPCODE_SEND_IMM" opcode::SEND_IMM,
        "MLX5_OPCODE_RDMA_READ" opcode::RDMA_READ,
        "MLX5_OPCODE_ATOMIC_CS" opcode::ATOMIC_CS,
        "MLX5_OPCODE_ATOMIC_FA" opcode::ATOMIC_FA,
        "MLX5_WQE_CTRL_CQ_UPDATE" flags::COMPLETION,
        "MLX5_WQE_CTRL_FENCE" flags::FENCE,
        "(unsigned)MLX5_INLINE_SEG" wqe::INLINE,
        "MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR" syndrome::LOCAL_LENGTH,
        "MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR" syndrome::LOCAL_QP_OPERATION,
        "MLX5_CQE_SYNDROME_LOCAL_PROT_ERR" syndrome::LOCAL_PROTECTION,
        "MLX5_CQE_SYNDROME_WR_FLUSH_ERR" syndrome::FLUSHED,
        "MLX5_CQE_SYNDROME_BAD_RESP_ERR" syndrome::BAD_RESPONSE,
        "MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR" syndrome::LOCAL_ACCESS,
        "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR" syndrome::REMOTE_INVALID_REQUEST,
        "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR" syndrome::REMOTE_ACCESS,
        "MLX5_CQE_SYNDROME_REMOTE_OP_ERR" syndrome::REMOTE_OPERATION,
        "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR" syndrome::RETRIES,
        "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR" syndrome::RNR_RETRIES,
        "MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR" syndrome::REMOTE_ABORTED,
        "MLX5_CQE_REQ" Kind::Request.to_bits(),
        "MLX5_CQE_RESP_WR_IMM" Kind::WriteImm.to_bits(),
        "MLX5_CQE_RESP_SEND" Kind::Receive.to_bits(),
        "MLX5_CQE_RESP_SEND_IMM" Kind::ReceiveImm.to_bits(),
        "MLX5_CQE_REQ_ERR" Kind::RequestError.to_bits(),
        "MLX5_CQE_RESP_ERR" Kind::ReceiveError.to_bits(),
        "MLX5_CQE_INVALID" Kind::None.to_bits(),
    }
}

/// Offsets that are plain numbers in Rust.
fn offsets() -> Vec<Pair> {
    let named = [
        ("MLX5_SEND_WQE_BB", wqe::BLOCK),
        ("sizeof(struct mlx5_wqe_ctrl_seg)", wqe::SEGMENT),
        ("sizeof(struct mlx5_wqe_raddr_seg)", wqe::SEGMENT),
        ("sizeof(struct mlx5_wqe_data_seg)", wqe::SEGMENT),
        ("sizeof(struct mlx5_wqe_atomic_seg)", wqe::SEGMENT),
        ("sizeof(struct mlx5_wqe_inl_data_seg)", layout::DATA_INLINE),
        ("sizeof(struct mlx5_cqe64)", tokenyard_sys_mlx5::cqe::BYTES),
        ("4 * MLX5_RCV_DBR", doorbell::RECEIVE),
        ("4 * MLX5_SND_DBR", doorbell::SEND),
    ];
    let placed = [
        ("mlx5_wqe_ctrl_seg", "opmod_idx_opcode", layout::CTRL_OPCODE),
        ("mlx5_wqe_ctrl_seg", "qpn_ds", layout::CTRL_QPN_DS),
        ("mlx5_wqe_ctrl_seg", "signature", layout::CTRL_SIGNATURE),
        ("mlx5_wqe_ctrl_seg", "dci_stream_channel_id", layout::CTRL_STREAM),
        ("mlx5_wqe_ctrl_seg", "fm_ce_se", layout::CTRL_FLAGS),
        ("mlx5_wqe_ctrl_seg", "imm", layout::CTRL_IMM),
        ("mlx5_wqe_raddr_seg", "raddr", layout::REMOTE_ADDRESS),
        ("mlx5_wqe_raddr_seg", "rkey", layout::REMOTE_KEY),
        ("mlx5_wqe_raddr_seg", "reserved", layout::REMOTE_RESERVED),
        ("mlx5_wqe_data_seg", "byte_count", layout::DATA_BYTES),
        ("mlx5_wqe_data_seg", "lkey", layout::DATA_KEY),
        ("mlx5_wqe_data_seg", "addr", layout::DATA_ADDRESS),
        ("mlx5_wqe_atomic_seg", "swap_add", layout::ATOMIC_ADD),
        ("mlx5_wqe_atomic_seg", "compare", layout::ATOMIC_COMPARE),
        ("mlx5_cqe64", "srqn_uidx", cqe::USER_INDEX),
        ("mlx5_cqe64", "imm_inval_pkey", cqe::IMM),
        ("mlx5_cqe64", "byte_cnt", cqe::BYTE_COUNT),
        ("mlx5_cqe64", "sop_drop_qpn", cqe::OPCODE_QPN),
        ("mlx5_cqe64", "wqe_counter", cqe::COUNTER),
        ("mlx5_cqe64", "op_own", cqe::KIND_OWNER),
        ("mlx5_err_cqe", "vendor_err_synd", cqe::VENDOR),
        ("mlx5_err_cqe", "syndrome", cqe::SYNDROME),
        ("mlx5_err_cqe", "s_wqe_opcode_qpn", cqe::OPCODE_QPN),
        ("mlx5_err_cqe", "wqe_counter", cqe::COUNTER),
        ("mlx5_err_cqe", "op_own", cqe::KIND_OWNER),
    ];
    let named = named.map(|(c, at)| (c.to_owned(), at as u64));
    let placed = placed.map(|(name, c, at)| (format!("offsetof(struct {name}, {c})"), at as u64));
    named.into_iter().chain(placed).collect()
}

/// The values that the C compiler computes.
fn header_values(pairs: &[Pair]) -> BTreeMap<String, u64> {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/mlx5dv.h>\nint main(void) {\n",
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
    let pairs = [structures(), constants(), offsets()].concat();
    let header = header_values(&pairs);
    for (expression, ours) in &pairs {
        assert_eq!(Some(ours), header.get(expression), "{expression}");
    }
    assert!(pairs.len() > 120, "{} values were compared", pairs.len());
}
