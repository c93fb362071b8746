//! Commands of drivers, as bytes.

use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, DestroyCq, DestroyQp, Done, Init2Rtr, Mailbox,
    OP_MOD, OPCODE, QP_STATE_ERR, QP_STATE_INIT, QP_STATE_RST, QP_STATE_RTR, QP_STATE_RTS,
    QueryHcaCap, QueryHcaCapOut, QueryQp, QueryQpOut, Rst2Init, Rtr2Rts, ToErr,
};
use tokenyard_sys_mlx5::{cqe, doorbell, wqe};

use crate::hca::{Hca, Profile};
use crate::lifecycle::{CqRequest, QpRequest, Receives};
use crate::object::{Access, Connection, State};
use crate::wire::End;

/// A command that the device refuses, and the cause. The log of violations has it, too.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Atomics of 8 bytes.
const ATOMIC_8: u8 = 3;
/// Most reads and atomics of a queue pair at once, as a power of two.
const LOG_READS: u8 = 4;

/// Executes a command, and returns its answer.
pub(crate) fn execute(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let opcode = OPCODE.get(input);
    match opcode {
        // libmlx5 itself asks about offloads. This device has none.
        0x100 if hca.store().profile == Profile::Library && OP_MOD.get(input) != 1 => {
            Ok(QueryHcaCapOut::default().to_bytes())
        }
        0x100 => {
            parse::<QueryHcaCap>(hca, input)?;
            Ok(capabilities())
        }
        0x400 => create_cq(hca, input),
        0x401 => {
            let DestroyCq { cqn } = parse(hca, input)?;
            hca.store().known_cq(cqn)?;
            hca.destroy_cq(cqn);
            Ok(Done::default().to_bytes())
        }
        0x500 => create_qp(hca, input),
        0x501 => {
            let DestroyQp { qpn } = parse(hca, input)?;
            hca.store().known_qp(qpn)?;
            hca.destroy_qp(qpn);
            Ok(Done::default().to_bytes())
        }
        0x502 => to_init(hca, input),
        0x503 => to_rtr(hca, input),
        0x504 => to_rts(hca, input),
        0x507 => {
            let ToErr { qpn } = parse(hca, input)?;
            hca.to_error(qpn)?;
            Ok(Done::default().to_bytes())
        }
        0x50b => query_qp(hca, input),
        _ => Err(hca.store().refuse(format!("command {opcode:#x}: not known"))),
    }
}

fn parse<M: Mailbox>(hca: &mut Hca, input: &[u8]) -> Result<M, Refused> {
    M::from_bytes(input).map_err(|error| hca.store().refuse(error.to_string()))
}

/// The address of `bytes` bytes at an offset of a umem.
fn in_umem(hca: &mut Hca, id: u32, offset: u64, bytes: u64) -> Result<u64, Refused> {
    let Some(umem) = hca.store().umems.get(&id) else {
        return Err(hca.store().refuse(format!("found no umem {id:#x}")));
    };
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= umem.bytes);
    let (address, size) = (umem.address.wrapping_add(offset), umem.bytes);
    if fits {
        return Ok(address);
    }
    Err(hca
        .store()
        .refuse(format!("umem {id:#x}: found {bytes} bytes at {offset:#x}; it has {size}")))
}

fn create_cq(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let cq: CreateCq = parse(hca, input)?;
    hca.store().known_page(cq.uar_page)?;
    let bytes = (cqe::BYTES as u64) << cq.log_size;
    let buffer = in_umem(hca, cq.buffer_umem_id, cq.buffer_offset, bytes)?;
    let record = in_umem(hca, cq.dbr_umem_id, cq.dbr_offset, doorbell::RECORD as u64)?;
    let cqn = hca.create_cq(CqRequest {
        buffer,
        log_size: cq.log_size,
        stride: cqe::BYTES as u64,
        collapsed: true,
        overrun_ignored: true,
        record,
        umems: vec![cq.buffer_umem_id, cq.dbr_umem_id],
    })?;
    Ok(CreateCqOut { cqn, ..CreateCqOut::default() }.to_bytes())
}

fn create_qp(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let qp: CreateQp = parse(hca, input)?;
    if qp.send_cqn != qp.receive_cqn {
        let text = format!(
            "found completion queues {:#x} and {:#x}; expected one for both",
            qp.send_cqn, qp.receive_cqn
        );
        return Err(hca.store().refuse(text));
    }
    let bytes = (wqe::BLOCK as u64) << qp.log_sq_size;
    let sq = in_umem(hca, qp.wq_umem_id, qp.wq_offset, bytes)?;
    let record = in_umem(hca, qp.dbr_umem_id, qp.dbr_offset, doorbell::RECORD as u64)?;
    let qpn = hca.create_qp(QpRequest {
        pd: qp.pd,
        page: qp.uar_page,
        user_index: qp.user_index,
        sq,
        blocks: 1 << qp.log_sq_size,
        record,
        send_cq: qp.send_cqn,
        receive_cq: qp.receive_cqn,
        receives: Receives::None,
        umems: vec![qp.wq_umem_id, qp.dbr_umem_id],
    })?;
    // A program that writes mailboxes itself writes requests itself.
    if let Some(qp) = hca.store().qps.get_mut(&qpn) {
        qp.limits = Profile::Kernels.limits();
    }
    Ok(CreateQpOut { qpn, ..CreateQpOut::default() }.to_bytes())
}

fn to_init(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let init: Rst2Init = parse(hca, input)?;
    if init.port != 1 {
        return Err(hca.store().refuse(format!("found port {}; expected 1", init.port)));
    }
    if init.remote_atomic && init.atomic_mode != ATOMIC_8 {
        let text = format!("found atomic mode {}; expected {ATOMIC_8}", init.atomic_mode);
        return Err(hca.store().refuse(text));
    }
    let rights = [
        (init.remote_read, Access::REMOTE_READ),
        (init.remote_write, Access::REMOTE_WRITE),
        (init.remote_atomic, Access::REMOTE_ATOMIC),
    ];
    let given = rights.iter().filter(|(is, _)| *is);
    let access = given.fold(Access::default(), |all, (_, right)| all.and(*right));
    hca.to_init(init.qpn, access)?;
    Ok(Done::default().to_bytes())
}

fn to_rtr(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let rtr: Init2Rtr = parse(hca, input)?;
    let numbers = [
        ("mtu", u64::from(rtr.mtu), 1..=5),
        ("log_msg_max", u64::from(rtr.log_msg_max), 30..=30),
        ("log_rra_max", u64::from(rtr.log_rra_max), 0..=u64::from(LOG_READS)),
        ("port", u64::from(rtr.port), 1..=1),
    ];
    for (name, found, expected) in numbers {
        if !expected.contains(&found) {
            return Err(hca
                .store()
                .refuse(format!("Init2Rtr: found {name} {found}; expected {expected:?}")));
        }
    }
    let to = Connection {
        peer: End { lid: rtr.remote_lid, qpn: rtr.remote_qpn },
        receive_number: rtr.next_receive_psn,
        rnr_timer: rtr.min_rnr_nak,
        ..Connection::default()
    };
    hca.to_ready_to_receive(rtr.qpn, to)?;
    Ok(Done::default().to_bytes())
}

fn to_rts(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let rts: Rtr2Rts = parse(hca, input)?;
    if rts.log_sra_max > LOG_READS {
        let text = format!("found log_sra_max {}; expected 0 to {LOG_READS}", rts.log_sra_max);
        return Err(hca.store().refuse(text));
    }
    let to = Connection {
        send_number: rts.next_send_psn,
        timeout: rts.ack_timeout,
        retries: rts.retry_count,
        rnr_retries: rts.rnr_retry,
        reads: 1 << rts.log_sra_max,
        ..Connection::default()
    };
    hca.to_ready_to_send(rts.qpn, to)?;
    Ok(Done::default().to_bytes())
}

fn query_qp(hca: &mut Hca, input: &[u8]) -> Result<Vec<u8>, Refused> {
    let QueryQp { qpn } = parse(hca, input)?;
    hca.store().known_qp(qpn)?;
    let taken = hca.store().qps.get(&qpn).map_or(0, |qp| qp.taken);
    let state = match hca.state(qpn) {
        None | Some(State::Reset) => QP_STATE_RST,
        Some(State::Init) => QP_STATE_INIT,
        Some(State::ReadyToReceive) => QP_STATE_RTR,
        Some(State::ReadyToSend) => QP_STATE_RTS,
        Some(State::Error) => QP_STATE_ERR,
    };
    let answer =
        QueryQpOut { state, hw_sq_counter: taken, sw_sq_counter: taken, ..QueryQpOut::default() };
    Ok(answer.to_bytes())
}

/// The answer to a query of capabilities.
fn capabilities() -> Vec<u8> {
    QueryHcaCapOut {
        log_max_ra_req_qp: LOG_READS,
        log_max_ra_res_qp: LOG_READS,
        cqe_version: 1,
        ..QueryHcaCapOut::default()
    }
    .to_bytes()
}
