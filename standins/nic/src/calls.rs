//! The functions of the library, with the types of `verbs.h`.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;

use tokenyard_sys_verbs::Library;
use tokenyard_sys_verbs::ffi::{
    self, AsyncEvent, CompChannel, DeviceAttr, Gid, GidEntry, PortAttr, QpAttr, QpInitAttr,
    RawContext, RawCq, RawMr, RawPd, RawQp, RawSrq, RecvWr, SendWr, SrqInitAttr, Wc,
};

use crate::world::{CqState, Device, INLINE, QpState, Region, Sent, SrqState, World};

/// `IBV_PORT_DOWN`.
const PORT_DOWN: c_int = 1;

pub(super) static LIBRARY: Library = Library {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid_table,
    get_async_event,
    ack_async_event,
    event_type_str: words,
    wc_status_str: words,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_cq,
    destroy_cq,
    create_srq,
    destroy_srq,
    create_qp,
    modify_qp,
    destroy_qp,
    reg_dmabuf_mr: None,
    create_ah: None,
    destroy_ah: None,
};

/// The object behind a caller's pointer: its public part, and its place in the world's tables.
#[repr(C)]
struct Held<T> {
    raw: T,
    at: usize,
}

/// Makes an object and passes its pointer to the caller.
fn give<T>(raw: T, at: usize) -> *mut T {
    Box::into_raw(Box::new(Held { raw, at })).cast()
}

/// # Safety
/// `raw` comes from `give` and has not been passed to `take_back`.
unsafe fn place<T>(raw: *mut T) -> usize {
    // SAFETY: by this function's contract.
    unsafe { (*raw.cast::<Held<T>>()).at }
}

/// # Safety
/// As of `place`; this is the last use.
unsafe fn take_back<T>(raw: *mut T) -> usize {
    // SAFETY: by this function's contract.
    unsafe { Box::from_raw(raw.cast::<Held<T>>()).at }
}

fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for structures of numbers, pointers and optional functions.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ffi::Device {
    let world = World::enter();
    let devices = world.nics.iter().map(|nic| std::ptr::from_ref(nic.device).cast_mut().cast());
    let mut list: Vec<*mut ffi::Device> = devices.collect();
    // SAFETY: the caller's buffer.
    unsafe { *count = list.len() as c_int };
    list.push(std::ptr::null_mut());
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

unsafe extern "C" fn free_device_list(list: *mut *mut ffi::Device) {
    let mut length = 1;
    // SAFETY: made by `get_device_list`, which ends lists with null.
    unsafe {
        while !(*list.add(length - 1)).is_null() {
            length += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length)));
    }
}

unsafe extern "C" fn get_device_name(device: *mut ffi::Device) -> *const c_char {
    // SAFETY: devices live for ever.
    unsafe { (*device.cast::<Device>()).name.as_ptr() }
}

unsafe extern "C" fn open_device(device: *mut ffi::Device) -> *mut RawContext {
    let mut context: MaybeUninit<RawContext> = MaybeUninit::zeroed();
    let raw = context.as_mut_ptr();
    // SAFETY: zeroes are valid for every field; devices live for ever.
    unsafe {
        (*raw).device = device;
        (*raw).ops.poll_cq = Some(poll_cq);
        (*raw).ops.post_send = Some(post_send);
        (*raw).ops.post_srq_recv = Some(post_srq_recv);
        // The flags of this descriptor can be changed, and no code reads it.
        (*raw).async_fd = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        give(context.assume_init(), (*device.cast::<Device>()).index)
    }
}

unsafe extern "C" fn close_device(context: *mut RawContext) -> c_int {
    // SAFETY: made by `open_device`, closed once.
    unsafe { libc::close((*context).async_fd) };
    // SAFETY: as above.
    World::enter().note(unsafe { take_back(context) }, "close_device");
    0
}

unsafe extern "C" fn query_device(_: *mut RawContext, attr: *mut DeviceAttr) -> c_int {
    let mut found: DeviceAttr = zeroed();
    (found.max_qp, found.max_qp_wr, found.max_cqe) = (4096, 4096, 65_536);
    (found.max_srq, found.max_srq_wr) = (1, 1024);
    (found.max_qp_rd_atom, found.max_qp_init_rd_atom, found.atomic_cap) = (16, 16, 1);
    found.phys_port_cnt = 1;
    // SAFETY: the caller's buffer.
    unsafe { *attr = found };
    0
}

unsafe extern "C" fn query_port(context: *mut RawContext, _: u8, attr: *mut PortAttr) -> c_int {
    // SAFETY: an open device.
    let is_cut = World::enter().nics[unsafe { place(context) }].is_cut;
    let mut found: PortAttr = zeroed();
    let state = if is_cut { PORT_DOWN } else { ffi::PORT_ACTIVE };
    (found.state, found.active_mtu, found.link_layer) = (state, 5, 2);
    found.max_msg_sz = 1 << 30;
    // SAFETY: the caller's buffer.
    unsafe { *attr = found };
    0
}

unsafe extern "C" fn query_gid_table(
    context: *mut RawContext,
    entries: *mut GidEntry,
    _: usize,
    _: u32,
    _: usize,
) -> isize {
    // SAFETY: an open device.
    let host = unsafe { place(context) } as u8 + 1;
    let gid = Gid { raw: Ipv4Addr::new(10, 0, 0, host).to_ipv6_mapped().octets() };
    let entry = GidEntry { gid, port_num: 1, gid_type: ffi::GID_TYPE_ROCE_V2, ..zeroed() };
    // SAFETY: the caller's buffer, which has room for more than one entry.
    unsafe { *entries = entry };
    1
}

unsafe extern "C" fn get_async_event(context: *mut RawContext, event: *mut AsyncEvent) -> c_int {
    // SAFETY: an open device.
    let nic = unsafe { place(context) };
    let mut world = World::enter();
    let Some((found, about)) = world.nics[nic].events.pop_front() else { return -1 };
    let about = about.and_then(|number| world.qps.get(number.wrapping_sub(1) as usize));
    // SAFETY: the caller's buffer.
    unsafe {
        (*event).event_type = found;
        (*event).element = about.map_or(std::ptr::null_mut(), |qp| qp.raw as *mut c_void);
    }
    0
}

unsafe extern "C" fn ack_async_event(_: *mut AsyncEvent) {}

unsafe extern "C" fn words(_: c_int) -> *const c_char {
    c"of a stand-in".as_ptr()
}

unsafe extern "C" fn alloc_pd(context: *mut RawContext) -> *mut RawPd {
    // SAFETY: an open device.
    give(RawPd { context, handle: 0 }, unsafe { place(context) })
}

unsafe extern "C" fn dealloc_pd(pd: *mut RawPd) -> c_int {
    // SAFETY: made by `alloc_pd`, freed once.
    World::enter().note(unsafe { take_back(pd) }, "dealloc_pd");
    0
}

unsafe extern "C" fn reg_mr(
    pd: *mut RawPd,
    addr: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut RawMr {
    let mut world = World::enter();
    let key = world.regions.len() as u32;
    world.regions.push(Some(Region { address: addr as u64, bytes: length as u64 }));
    // SAFETY: a live domain.
    let (context, nic) = unsafe { ((*pd).context, place(pd)) };
    give(RawMr { context, pd, addr, length, handle: 0, lkey: key, rkey: key }, nic)
}

unsafe extern "C" fn dereg_mr(mr: *mut RawMr) -> c_int {
    let mut world = World::enter();
    // SAFETY: made by `reg_mr`, deregistered once.
    let (key, nic) = unsafe { ((*mr).lkey, take_back(mr)) };
    world.regions[key as usize] = None;
    world.note(nic, "dereg_mr");
    0
}

unsafe extern "C" fn create_cq(
    context: *mut RawContext,
    entries: c_int,
    _: *mut c_void,
    _: *mut CompChannel,
    _: c_int,
) -> *mut RawCq {
    let mut world = World::enter();
    let room = entries as usize;
    // SAFETY: an open device.
    let nic = unsafe { place(context) };
    world.cqs.push(CqState { nic, entries: VecDeque::with_capacity(room), room });
    give(RawCq { context }, world.cqs.len() - 1)
}

unsafe extern "C" fn destroy_cq(cq: *mut RawCq) -> c_int {
    let mut world = World::enter();
    // SAFETY: made by `create_cq`, destroyed once.
    let nic = world.cqs[unsafe { take_back(cq) }].nic;
    world.note(nic, "destroy_cq");
    0
}

unsafe extern "C" fn poll_cq(cq: *mut RawCq, room: c_int, out: *mut Wc) -> c_int {
    let mut world = World::enter();
    // SAFETY: a live queue.
    let entries = &mut world.cqs[unsafe { place(cq) }].entries;
    let count = entries.len().min(room as usize);
    for (at, completion) in entries.drain(..count).enumerate() {
        // SAFETY: the caller has room for this many.
        unsafe { out.add(at).write(completion) };
    }
    count as c_int
}

unsafe extern "C" fn create_srq(pd: *mut RawPd, _: *mut SrqInitAttr) -> *mut RawSrq {
    let mut world = World::enter();
    // SAFETY: a live domain.
    let (context, nic) = unsafe { ((*pd).context, place(pd)) };
    world.srqs.push(SrqState { nic, posted: 0 });
    give(RawSrq { context }, world.srqs.len() - 1)
}

unsafe extern "C" fn destroy_srq(srq: *mut RawSrq) -> c_int {
    let mut world = World::enter();
    // SAFETY: made by `create_srq`, destroyed once.
    let at = unsafe { take_back(srq) };
    world.srqs[at].posted = 0;
    let nic = world.srqs[at].nic;
    world.note(nic, "destroy_srq");
    0
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut RawSrq,
    mut list: *mut RecvWr,
    _: *mut *mut RecvWr,
) -> c_int {
    let mut world = World::enter();
    // SAFETY: a live queue, and a list that ends with null.
    unsafe {
        let at = place(srq);
        while !list.is_null() {
            world.srqs[at].posted += 1;
            list = (*list).next;
        }
    }
    // Senders may wait for these.
    world.execute_all();
    0
}

unsafe extern "C" fn create_qp(pd: *mut RawPd, attr: *mut QpInitAttr) -> *mut RawQp {
    let mut world = World::enter();
    // SAFETY: a live domain, live queues and the caller's buffer.
    unsafe {
        let QpInitAttr { send_cq, recv_cq, srq, cap, qp_context, .. } = &mut *attr;
        cap.max_inline_data = INLINE as u32;
        let depth = cap.max_send_wr as usize;
        world.qps.push(QpState {
            nic: place(pd),
            raw: 0,
            state: ffi::QPS_RESET,
            send_cq: place(*send_cq),
            recv_cq: place(*recv_cq),
            srq: (!srq.is_null()).then(|| place(*srq)),
            peer: 0,
            sent: VecDeque::with_capacity(depth),
            depth,
        });
        let qp_num = world.qps.len() as u32;
        let raw = RawQp {
            context: (*pd).context,
            qp_context: *qp_context,
            pd,
            send_cq: *send_cq,
            recv_cq: *recv_cq,
            srq: *srq,
            handle: 0,
            qp_num,
        };
        let at = qp_num as usize - 1;
        let raw = give(raw, at);
        world.qps[at].raw = raw as usize;
        raw
    }
}

unsafe extern "C" fn modify_qp(qp: *mut RawQp, attr: *mut QpAttr, mask: c_int) -> c_int {
    let mut world = World::enter();
    // SAFETY: a live queue pair, and the caller's structure.
    let (at, attr) = unsafe { (place(qp), &*attr) };
    let nic = world.qps[at].nic;
    if attr.qp_state == ffi::QPS_ERR && world.nics[nic].unbreakable {
        return libc::EIO;
    }
    if mask & ffi::QP_DEST_QPN != 0 {
        world.qps[at].peer = attr.dest_qp_num;
    }
    world.qps[at].state = attr.qp_state;
    world.execute_all();
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut RawQp) -> c_int {
    let mut world = World::enter();
    // SAFETY: made by `create_qp`, destroyed once.
    let at = unsafe { take_back(qp) };
    let QpState { nic, state, sent, .. } = &mut world.qps[at];
    let nic = *nic;
    *state = ffi::QPS_RESET;
    sent.clear();
    world.note(nic, "destroy_qp");
    0
}

unsafe extern "C" fn post_send(
    qp: *mut RawQp,
    mut list: *mut SendWr,
    bad: *mut *mut SendWr,
) -> c_int {
    let mut world = World::enter();
    // SAFETY: a live queue pair.
    let at = unsafe { place(qp) };
    while !list.is_null() {
        let nic = world.qps[at].nic;
        let left = &mut world.nics[nic].refuse_after;
        let refused = *left == Some(0);
        *left = left.and_then(|left| left.checked_sub(1));
        if refused || world.qps[at].sent.len() == world.qps[at].depth {
            // The requests before the refused one are posted, so they are executed.
            world.execute(at);
            // SAFETY: the caller's buffer.
            unsafe { *bad = list };
            return libc::ENOMEM;
        }
        // SAFETY: a list that ends with null; memory that it names is mapped during the call.
        unsafe {
            world.qps[at].sent.push_back(taken(&*list));
            list = (*list).next;
        }
    }
    world.execute(at);
    0
}

/// # Safety
/// Inline memory that `wr` names is mapped.
unsafe fn taken(wr: &SendWr) -> Sent {
    let adds = wr.opcode == ffi::WR_ATOMIC_FETCH_AND_ADD;
    // SAFETY: the opcode determines which of the two it is.
    let (remote, rkey, add) = unsafe {
        match adds {
            true => (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey, wr.wr.atomic.compare_add),
            false => (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey, 0),
        }
    };
    let mut sent = Sent {
        id: wr.wr_id,
        opcode: wr.opcode,
        reported: wr.send_flags & ffi::SEND_SIGNALED != 0,
        imm: wr.imm_data,
        inline: None,
        local: 0,
        bytes: 0,
        lkey: 0,
        remote,
        rkey,
        add,
    };
    if wr.num_sge == 1 {
        // SAFETY: by this function's contract.
        let sge = unsafe { *wr.sg_list };
        (sent.local, sent.bytes, sent.lkey) = (sge.addr, u64::from(sge.length), sge.lkey);
        if wr.send_flags & ffi::SEND_INLINE != 0 {
            let mut bytes = [0; INLINE];
            let length = (sge.length as usize).min(INLINE);
            // SAFETY: by this function's contract.
            unsafe { std::ptr::copy(sge.addr as *const u8, bytes.as_mut_ptr(), length) };
            sent.inline = Some(bytes);
        }
    }
    sent
}
