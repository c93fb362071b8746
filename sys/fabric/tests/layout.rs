//! The bindings have the layouts of the installed headers: a C program prints them, and the test
//! compares. It needs gcc and libfabric's headers (package libfabric-dev).

use std::mem::offset_of;
use std::process::Command;

use tokenyard_sys_fabric::{consts, ops, types};

/// Names of a structure in C, with size and offsets in Rust.
struct Layout {
    name: &'static str,
    /// `None` where Rust omits the last fields, or C has versions of different lengths.
    size: Option<usize>,
    fields: Vec<(&'static str, usize)>,
}

macro_rules! layout {
    ($module:ident :: $name:ident, $whole:expr, $($field:ident),+) => {
        Layout {
            name: stringify!($name),
            size: if $whole { Some(size_of::<$module::$name>()) } else { None },
            fields: vec![$((stringify!($field), offset_of!($module::$name, $field))),+],
        }
    };
}

fn objects() -> Vec<Layout> {
    vec![
        layout!(types::fid, true, fclass, context, ops),
        layout!(types::fid_fabric, true, fid, ops, api_version),
        layout!(types::fid_domain, true, fid, ops, mr),
        layout!(types::fid_av, true, fid, ops),
        layout!(types::fid_cq, true, fid, ops),
        layout!(types::fid_ep, true, fid, ops, cm, msg, rma, tagged, atomic, collective),
        layout!(types::fid_mr, true, fid, mem_desc, key),
        layout!(types::fid_nic, true, fid, device_attr, bus_attr, link_attr, prov_attr),
        layout!(ops::fi_ops, false, size, close, bind, control, ops_open),
        layout!(ops::fi_ops_fabric, false, size, domain, passive_ep),
        layout!(ops::fi_ops_domain, false, size, av_open, cq_open, endpoint, scalable_ep),
        layout!(ops::fi_ops_mr, true, size, reg, regv, regattr),
        layout!(ops::fi_ops_av, false, size, insert, insertsvc, insertsym, remove, lookup, straddr),
        layout!(
            ops::fi_ops_cq,
            true,
            size,
            read,
            readfrom,
            readerr,
            sread,
            sreadfrom,
            signal,
            strerror
        ),
        layout!(ops::fi_ops_ep, false, size, cancel, getopt, setopt),
        layout!(ops::fi_ops_cm, false, size, setname, getname),
        layout!(
            ops::fi_ops_rma,
            true,
            size,
            read,
            readv,
            readmsg,
            write,
            writev,
            writemsg,
            inject,
            writedata,
            injectdata
        ),
    ]
}

fn attributes() -> Vec<Layout> {
    vec![
        layout!(
            types::fi_tx_attr,
            true,
            caps,
            mode,
            op_flags,
            msg_order,
            comp_order,
            inject_size,
            size,
            iov_limit,
            rma_iov_limit,
            tclass
        ),
        layout!(
            types::fi_rx_attr,
            true,
            caps,
            mode,
            op_flags,
            total_buffered_recv,
            size,
            iov_limit
        ),
        layout!(
            types::fi_ep_attr,
            true,
            type_,
            protocol,
            max_msg_size,
            mem_tag_format,
            tx_ctx_cnt,
            auth_key_size,
            auth_key
        ),
        layout!(
            types::fi_domain_attr,
            true,
            domain,
            name,
            threading,
            control_progress,
            data_progress,
            resource_mgmt,
            av_type,
            mr_mode,
            mr_key_size,
            cq_data_size,
            mr_iov_limit,
            caps,
            auth_key,
            mr_cnt,
            tclass
        ),
        layout!(types::fi_fabric_attr, true, fabric, name, prov_name, prov_version, api_version),
        layout!(
            types::fi_info,
            true,
            next,
            caps,
            mode,
            addr_format,
            src_addrlen,
            dest_addrlen,
            src_addr,
            dest_addr,
            handle,
            tx_attr,
            rx_attr,
            ep_attr,
            domain_attr,
            fabric_attr,
            nic
        ),
        layout!(types::fi_device_attr, true, name, device_id, driver, firmware),
        layout!(types::fi_pci_attr, true, domain_id, bus_id, device_id, function_id),
        layout!(types::fi_av_attr, true, type_, rx_ctx_bits, count, name, map_addr, flags),
        layout!(types::fi_cq_attr, true, size, flags, format, wait_obj, wait_cond, wait_set),
        layout!(types::fi_cq_data_entry, true, op_context, flags, len, buf, data),
        layout!(
            types::fi_cq_err_entry,
            true,
            op_context,
            flags,
            data,
            tag,
            olen,
            err,
            prov_errno,
            err_data,
            err_data_size
        ),
        layout!(types::iovec, true, iov_base, iov_len),
        layout!(types::fi_rma_iov, true, addr, len, key),
        layout!(
            types::fi_msg_rma,
            true,
            msg_iov,
            desc,
            iov_count,
            addr,
            rma_iov,
            rma_iov_count,
            context,
            data
        ),
        layout!(
            types::fi_mr_attr,
            false,
            mr_iov,
            iov_count,
            access,
            offset,
            requested_key,
            context,
            auth_key_size,
            auth_key,
            iface,
            device
        ),
        layout!(types::fi_context2, true, internal),
    ]
}

macro_rules! constants {
    ($($name:ident),+ $(,)?) => { vec![$((stringify!($name), consts::$name as u64)),+] };
}

fn constants() -> Vec<(&'static str, u64)> {
    constants![
        FI_RMA,
        FI_READ,
        FI_WRITE,
        FI_RECV,
        FI_TRANSMIT,
        FI_REMOTE_READ,
        FI_REMOTE_WRITE,
        FI_REMOTE_CQ_DATA,
        FI_MORE,
        FI_COMPLETION,
        FI_INJECT,
        FI_INJECT_COMPLETE,
        FI_SELECTIVE_COMPLETION,
        FI_HMEM,
        FI_CONTEXT,
        FI_CONTEXT2,
        FI_MR_LOCAL,
        FI_MR_VIRT_ADDR,
        FI_MR_ALLOCATED,
        FI_MR_PROV_KEY,
        FI_MR_ENDPOINT,
        FI_MR_HMEM,
        FI_ADDR_STR,
        FI_EP_RDM,
        FI_THREAD_DOMAIN,
        FI_PROGRESS_MANUAL,
        FI_RM_ENABLED,
        FI_AV_TABLE,
        FI_CQ_FORMAT_DATA,
        FI_HMEM_CUDA,
        FI_HMEM_ROCR,
        FI_ENABLE,
        FI_OPT_ENDPOINT,
        FI_EAGAIN,
        FI_EAVAIL,
        FI_ENOKEY,
    ]
}

/// A C program that prints a line per size, offset and constant, with the lines expected.
fn program() -> (String, Vec<String>) {
    let headers = ["fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_rma", "fi_eq", "fi_errno"];
    let mut c = String::from("#include <stdio.h>\n#include <stddef.h>\n#include <sys/uio.h>\n");
    headers.iter().for_each(|header| c += &format!("#include <rdma/{header}.h>\n"));
    c += "int main(void) {\n";
    let mut expected = Vec::new();
    let mut line = |what: &str, expression: &str, value: u64| {
        c += &format!("printf(\"{what} %llu\\n\", (unsigned long long)({expression}));\n");
        expected.push(format!("{what} {value}"));
    };
    for Layout { name, size, fields } in objects().into_iter().chain(attributes()) {
        if let Some(size) = size {
            line(name, &format!("sizeof(struct {name})"), size as u64);
        }
        for (field, offset) in fields {
            let c_field = field.trim_end_matches('_');
            let expression = format!("offsetof(struct {name}, {c_field})");
            line(&format!("{name}.{field}"), &expression, offset as u64);
        }
    }
    for (name, value) in constants() {
        line(name, name, value);
    }
    c += "return 0;\n}\n";
    (c, expected)
}

#[test]
fn layouts_and_constants_are_those_of_the_installed_headers() {
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let (program, expected) = program();
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("gcc").args(["-o"]).arg(&binary).arg(&source).output();
    let compiled = compiled.expect("gcc runs: apt-get install gcc");
    let words = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "apt-get install libfabric-dev\n{words}");
    let output = Command::new(&binary).output().unwrap().stdout;
    let found: Vec<String> = String::from_utf8(output).unwrap().lines().map(Into::into).collect();
    assert_eq!(found, expected);
    assert!(found.len() > 150, "{}", found.len());
}
