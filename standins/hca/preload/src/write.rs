//! Requests by `write`: those that verbs need. Numbers and offsets are those of `rdma/ib_user_verbs.h` and
//! `rdma/mlx5-abi.h`.

use std::ffi::c_int;

use tokenyard_hca::{
    Access, Connection, CqRequest, End, QpRequest, ReceiveRequest, Receives, Region, State,
};

use crate::bytes::{Input, Output};
use crate::device::{Device, Object, Qp, lacks};
use crate::gpu;

const GET_CONTEXT: u8 = 0;
const QUERY_DEVICE: u8 = 1;
const QUERY_PORT: u8 = 2;
const ALLOC_PD: u8 = 3;
const DEALLOC_PD: u8 = 4;
const REG_MR: u8 = 9;
const DEREG_MR: u8 = 13;
const CREATE_CQ: u8 = 18;
const DESTROY_CQ: u8 = 20;
const CREATE_QP: u8 = 24;
const QUERY_QP: u8 = 25;
const MODIFY_QP: u8 = 26;
const DESTROY_QP: u8 = 27;
const CREATE_SRQ: u8 = 32;
const DESTROY_SRQ: u8 = 35;

/// The command is of the newer form.
const EXTENDED: u32 = 0x8000_0000;
/// A context with the right to send commands is asked for.
const WITH_DEVX: u32 = 1;
/// A queue pair names its page of registers.
const QP_FLAG_UAR_PAGE: u32 = 1 << 10;
/// Reads and atomics of a queue pair at once.
const READS: u32 = 16;
/// Entries of a completion queue, and of a shared receive queue.
const MOST_COMPLETIONS: u32 = 1 << 22;
const MOST_RECEIVES: u32 = 1 << 15;
/// The longest message.
const LONGEST: u32 = 1 << 30;
/// The least bytes of a receive of a shared queue.
const LEAST_RECEIVE: u32 = 32;

/// A command: its fixed part, where the driver's part begins, and room for the answer.
struct Command<'a> {
    input: Input<'a>,
    driver: Input<'a>,
    output: Output,
    /// Where the driver's part of the answer begins.
    driver_out: usize,
    extended: bool,
}

/// Answers a command.
///
/// # Safety
/// The command's pointer to room for an answer is valid for as many words as it says.
pub(crate) unsafe fn answer(device: &mut Device, bytes: &[u8]) -> Result<(), c_int> {
    let header = Input(bytes);
    let (command, words_out) = (header.u32(0), usize::from(header.u16(6)));
    let extended = command & EXTENDED != 0;
    let (response, begin, room) = if extended {
        let driver = usize::from(header.u16(18));
        (header.u64(8), 24, (words_out + driver) * 8)
    } else {
        (header.u64(8), 8, words_out * 4)
    };
    let (fixed, fixed_out) = sizes(command as u8, extended);
    let mut command = (
        command as u8,
        Command {
            input: header.from(begin),
            driver: header.from(begin + fixed),
            output: Output(vec![0; room]),
            driver_out: fixed_out,
            extended,
        },
    );
    execute(device, command.0, &mut command.1)?;
    if room > 0 && response != 0 {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(response as usize);
        // SAFETY: by this function's contract there is room for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(command.1.output.0.as_ptr(), to, room) };
    }
    Ok(())
}

/// Bytes of a command's fixed part, and of its answer's.
fn sizes(command: u8, extended: bool) -> (usize, usize) {
    match (command, extended) {
        (GET_CONTEXT, _) => (8, 8),
        (ALLOC_PD, _) => (8, 4),
        (CREATE_CQ, false) => (32, 8),
        (CREATE_CQ, true) => (32, 16),
        (CREATE_QP, false) => (56, 32),
        (CREATE_QP, true) => (64, 40),
        (CREATE_SRQ, _) => (32, 16),
        _ => (0, 0),
    }
}

fn execute(device: &mut Device, command: u8, call: &mut Command<'_>) -> Result<(), c_int> {
    match command {
        // As the kernel answers where firmware has no such contexts.
        GET_CONTEXT if call.driver.u32(8) & WITH_DEVX != 0 && lacks("devx") => {
            return Err(libc::EINVAL);
        }
        GET_CONTEXT => get_context(device, call),
        QUERY_DEVICE => query_device(call),
        QUERY_PORT => query_port(device, call),
        ALLOC_PD => {
            let pd = device.hca.allocate_pd();
            let handle = device.add(Object::Pd(pd));
            call.output.u32(0, handle);
            call.output.u32(call.driver_out, pd);
        }
        REG_MR => register(device, call)?,
        CREATE_CQ => create_cq(device, call)?,
        CREATE_SRQ => create_srq(device, call)?,
        CREATE_QP => create_qp(device, call)?,
        MODIFY_QP => modify_qp(device, call)?,
        QUERY_QP => query_qp(device, call)?,
        DEALLOC_PD | DEREG_MR => destroy(device, call.input.u32(0), &mut call.output)?,
        DESTROY_CQ | DESTROY_SRQ | DESTROY_QP => {
            destroy(device, call.input.u32(8), &mut call.output)?;
        }
        _ => return Err(libc::EOPNOTSUPP),
    }
    Ok(())
}

fn get_context(device: &Device, call: &mut Command<'_>) {
    // SAFETY: duplicates a descriptor; the library closes it.
    let fd = unsafe { libc::fcntl(device.async_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    crate::device::add_async(fd);
    let (out, at) = (&mut call.output, call.driver_out);
    out.u32(0, fd as u32);
    out.u32(4, 1);
    out.u32(at, 1 << 18); // room for queue pairs
    out.u32(at + 4, 512); // bytes of two registers
    out.u32(at + 12, 64); // of a cache line
    out.u16(at + 16, 1024); // of a request
    out.u16(at + 18, 512); // of a receive
    out.u32(at + 20, 32_768); // blocks of a queue
    out.u32(at + 24, 32_768); // receives of a queue
    out.u32(at + 28, 32_767); // receives of a shared queue
    out.u16(at + 32, 1); // ports
    out.u32(at + 40, 72); // bytes of this answer
    out.put(at + 44, &[1, 0, 1, 0]); // form of completions, no calls for address handles
    out.u32(at + 56, 12); // bytes of a page, as a power of two
    out.u32(at + 60, 1); // pages of registers in one
}

fn query_device(call: &mut Command<'_>) {
    let out = &mut call.output;
    out.u64(24, u64::MAX >> 1); // bytes of a region
    out.u64(32, 0xffff_f000); // sizes of pages
    out.u32(40, 0x2c9); // vendor
    for (at, value) in [
        (52, 1 << 18),              // queue pairs
        (56, 32_768),               // requests of one
        (64, 30),                   // pieces of a request
        (68, 30),                   // pieces of a read
        (72, 1 << 18),              // completion queues
        (76, MOST_COMPLETIONS - 1), // completions of one
        (80, 1 << 20),              // regions
        (84, 1 << 20),              // domains
        (88, READS),                // that a queue pair serves at once
        (96, READS << 18),
        (100, READS),   // that it has under way at once
        (108, 1),       // atomics: of this device
        (156, 1 << 16), // shared receive queues
        (160, 32_767),  // receives of one
        (164, 31),      // pieces of a receive
    ] {
        out.u32(at, value);
    }
    out.u16(168, 1);
    out.put(170, &[16, 1]); // delay of answers, ports
    if call.extended {
        let bytes = out.0.len().min(304) as u32;
        out.u32(180, bytes);
    }
}

fn query_port(device: &Device, call: &mut Command<'_>) {
    let (state, physical) = if device.hca.port_is_up() { (4, 5) } else { (1, 3) };
    let out = &mut call.output;
    out.u32(4, LONGEST);
    out.u32(16, 1); // GIDs
    out.u16(20, 1); // partition keys
    out.u16(22, device.lid);
    out.put(26, &[state, 5, 5]); // state, largest packet, packet
    out.put(34, &[2, 32, physical, 1]); // four queues of EDR, link, InfiniBand
}

fn pd(device: &Device, handle: u32) -> Result<u32, c_int> {
    match device.objects.get(&handle) {
        Some(Object::Pd(pd)) => Ok(*pd),
        _ => Err(libc::EINVAL),
    }
}

fn cq(device: &Device, handle: u32) -> Result<u32, c_int> {
    match device.objects.get(&handle) {
        Some(Object::Cq(cqn)) => Ok(*cqn),
        _ => Err(libc::EINVAL),
    }
}

fn qp(device: &Device, handle: u32) -> Result<Qp, c_int> {
    match device.objects.get(&handle) {
        Some(Object::Qp(qp)) => Ok(*qp),
        _ => Err(libc::EINVAL),
    }
}

fn register(device: &mut Device, call: &mut Command<'_>) -> Result<(), c_int> {
    let input = call.input;
    let pd = pd(device, input.u32(32))?;
    let access = Access(input.u32(36) & Access::ALL.0);
    let (memory, bytes, address) = (input.u64(8), input.u64(16), input.u64(24));
    by_address(memory, bytes)?;
    let region = Region { pd, address, bytes, memory, access };
    let key = device.hca.register(region).map_err(|_| libc::EINVAL)?;
    let handle = device.add(Object::Region(key));
    for (at, value) in [(0, handle), (4, key), (8, key)] {
        call.output.u32(at, value);
    }
    Ok(())
}

/// Prepares for accesses to memory that is given by its address. The kernel reaches a GPU's only with a module.
pub(crate) fn by_address(memory: u64, bytes: u64) -> Result<(), c_int> {
    if gpu::prepare(memory, bytes) && lacks("peermem") { Err(libc::EFAULT) } else { Ok(()) }
}

/// The entries of a queue with room for more than `asked`; at most `most`.
fn entries(asked: u32, most: u32) -> Result<u32, c_int> {
    if asked < most { Ok((asked + 1).next_power_of_two()) } else { Err(libc::EINVAL) }
}

fn create_cq(device: &mut Device, call: &mut Command<'_>) -> Result<(), c_int> {
    let at = if call.extended { 8 } else { 16 };
    let (entries, driver) = (entries(call.input.u32(at), MOST_COMPLETIONS)?, call.driver);
    if !matches!(driver.u32(16), 64 | 128) {
        return Err(libc::EINVAL);
    }
    let request = CqRequest {
        buffer: driver.u64(0),
        log_size: entries.trailing_zeros() as u8,
        stride: u64::from(driver.u32(16)),
        collapsed: false,
        overrun_ignored: call.extended && call.input.u32(24) & 2 != 0,
        record: driver.u64(8),
        umems: Vec::new(),
    };
    let cqn = device.hca.create_cq(request).map_err(|_| libc::EINVAL)?;
    let handle = device.add(Object::Cq(cqn));
    call.output.u32(0, handle);
    call.output.u32(4, entries - 1);
    if call.extended {
        let bytes = call.driver_out as u32;
        call.output.u32(12, bytes);
    }
    call.output.u32(call.driver_out, cqn);
    Ok(())
}

fn create_srq(device: &mut Device, call: &mut Command<'_>) -> Result<(), c_int> {
    let input = call.input;
    let (entries, pieces) = (entries(input.u32(20), MOST_RECEIVES)?, input.u32(24).min(31));
    let request = ReceiveRequest {
        pd: pd(device, input.u32(16))?,
        buffer: call.driver.u64(0),
        stride: u64::from((16 * (pieces + 1)).next_power_of_two().max(LEAST_RECEIVE)),
        entries,
        record: call.driver.u64(8),
    };
    let srqn = device.hca.create_srq(request).map_err(|_| libc::EINVAL)?;
    let handle = device.add(Object::Srq(srqn));
    for (at, value) in [(0, handle), (4, entries - 1), (8, pieces), (12, srqn)] {
        call.output.u32(at, value);
    }
    call.output.u32(call.driver_out, srqn);
    Ok(())
}

fn create_qp(device: &mut Device, call: &mut Command<'_>) -> Result<(), c_int> {
    // The newer form begins with the library's name, the older one with the answer's place.
    let input = call.input.from(if call.extended { 0 } else { 8 });
    let (driver, is_shared) = (call.driver, input.u8(46) != 0);
    if driver.u32(28) & QP_FLAG_UAR_PAGE == 0 || input.u8(45) != 2 {
        return Err(libc::EOPNOTSUPP);
    }
    let pd = pd(device, input.u32(8))?;
    let (buffer, record) = (driver.u64(0), driver.u64(8));
    let (entries, stride) = (driver.u32(20), 1_u64 << driver.u32(24).min(31));
    let receives = match (is_shared, entries) {
        (true, _) => match device.objects.get(&input.u32(20)) {
            Some(Object::Srq(srqn)) => Receives::Shared(*srqn),
            _ => return Err(libc::EINVAL),
        },
        (false, 0) => Receives::None,
        (false, _) => Receives::Own(ReceiveRequest { pd, buffer, stride, entries, record }),
    };
    let own = if is_shared { 0 } else { u64::from(entries) * stride };
    let request = QpRequest {
        pd,
        page: driver.u32(36),
        user_index: driver.u32(32),
        sq: buffer + own,
        blocks: driver.u32(16).max(1),
        record,
        send_cq: cq(device, input.u32(12))?,
        receive_cq: cq(device, input.u32(16))?,
        receives,
        umems: Vec::new(),
    };
    let qpn = device.hca.create_qp(request).map_err(|_| libc::EINVAL)?;
    let handle = device.add(Object::Qp(Qp { qpn, user: input.u64(0) }));
    call.output.u32(0, handle);
    call.output.u32(4, qpn);
    for word in 0..5 {
        call.output.u32(8 + 4 * word, input.u32(24 + 4 * word));
    }
    if call.extended {
        let bytes = call.driver_out as u32;
        call.output.u32(36, bytes);
    }
    Ok(())
}

fn modify_qp(device: &mut Device, call: &mut Command<'_>) -> Result<(), c_int> {
    let input = call.input;
    let Qp { qpn, .. } = qp(device, input.u32(64))?;
    let (now, hca) = (device.hca.state(qpn), &mut device.hca);
    if call.extended {
        call.output.u32(4, 8);
    }
    let done = match (input.u8(96), now) {
        (1, Some(State::Reset)) => hca.to_init(qpn, Access(input.u32(88) & Access::ALL.0)),
        (2, Some(State::Init)) => {
            let to = Connection {
                peer: End { lid: input.u16(20), qpn: input.u32(84) },
                receive_number: input.u32(76),
                rnr_timer: input.u8(103),
                ..Connection::default()
            };
            hca.to_ready_to_receive(qpn, to)
        }
        (3, Some(State::ReadyToReceive)) => {
            let to = Connection {
                send_number: input.u32(80),
                timeout: input.u8(105) & 31,
                retries: input.u8(106),
                rnr_retries: input.u8(107),
                reads: u32::from(input.u8(101)),
                ..Connection::default()
            };
            hca.to_ready_to_send(qpn, to)
        }
        (6, Some(_)) => hca.to_error(qpn),
        _ => return Err(libc::EINVAL),
    };
    done.map_err(|_| libc::EINVAL)
}

fn query_qp(device: &Device, call: &mut Command<'_>) -> Result<(), c_int> {
    let Qp { qpn, .. } = qp(device, call.input.u32(8))?;
    let state = match device.hca.state(qpn) {
        None | Some(State::Reset) => 0,
        Some(State::Init) => 1,
        Some(State::ReadyToReceive) => 2,
        Some(State::ReadyToSend) => 3,
        Some(State::Error) => 6,
    };
    call.output.put(108, &[state, state]);
    Ok(())
}

fn destroy(device: &mut Device, handle: u32, output: &mut Output) -> Result<(), c_int> {
    let object = device.objects.remove(&handle).ok_or(libc::EINVAL)?;
    match object {
        Object::Pd(pd) => device.hca.free_pd(pd),
        Object::Region(key) => device.hca.deregister(key),
        Object::Cq(cqn) => device.hca.destroy_cq(cqn),
        Object::Srq(srqn) => device.hca.destroy_srq(srqn),
        Object::Qp(Qp { qpn, user }) => {
            device.hca.destroy_qp(qpn);
            output.u32(0, device.forget_events(user));
        }
        other => {
            device.objects.insert(handle, other);
            return Err(libc::EINVAL);
        }
    }
    Ok(())
}
