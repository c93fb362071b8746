//! Requests by ioctl: those that DEVX and doorbell pages need. All others are refused as unsupported, and
//! libibverbs falls back to `write`. Numbers are those of `rdma/mlx5_user_ioctl_cmds.h`; objects, methods and
//! attributes of a driver begin at 0x1000.

use std::ffi::c_int;

use tokenyard_hca::{Access, Region};
use tokenyard_sys_mlx5::mailbox::{OPCODE, STATUS};

use crate::bytes::Input;
use crate::device::{Device, Object};
use crate::write::by_address;
use crate::{gpu, hooks};

const HEADER: usize = 24;
const ATTRIBUTE: usize = 16;

/// `UVERBS_OBJECT_MR` and `UVERBS_METHOD_REG_DMABUF_MR`: their attributes begin at 0.
const OBJECT_MR: u16 = 7;
const REG_DMABUF_MR: u16 = 4;
const OBJECT_DEVX: u16 = 0x1000;
const OBJECT_DEVX_OBJ: u16 = 0x1001;
const OBJECT_DEVX_UMEM: u16 = 0x1002;
const OBJECT_UAR: u16 = 0x1008;

/// The first and following methods and attributes of an object.
const FIRST: u16 = 0x1000;
const SECOND: u16 = 0x1001;
const THIRD: u16 = 0x1002;
const FOURTH: u16 = 0x1003;
const FIFTH: u16 = 0x1004;
const SEVENTH: u16 = 0x1006;

/// A request: its attributes, in the memory of the library.
struct Request {
    header: *mut u8,
    count: usize,
}

impl Request {
    /// The address of an attribute.
    fn attribute(&self, id: u16) -> Result<*mut u8, c_int> {
        (0..self.count)
            .map(|at| self.header.wrapping_add(HEADER + at * ATTRIBUTE))
            // SAFETY: the header says how many attributes follow it (`answer`).
            .find(|at| unsafe { at.cast::<u16>().read() } == id)
            .ok_or(libc::EINVAL)
    }

    fn length(&self, id: u16) -> Result<usize, c_int> {
        let at = self.attribute(id)?;
        // SAFETY: as in `attribute`; the second 16 bits.
        Ok(usize::from(unsafe { at.cast::<u16>().add(1).read() }))
    }

    /// The last 8 bytes of an attribute: a value, a handle or a pointer.
    fn data(&self, id: u16) -> Result<u64, c_int> {
        let at = self.attribute(id)?;
        // SAFETY: as in `attribute`; the last 8 bytes.
        Ok(unsafe { at.add(8).cast::<u64>().read_unaligned() })
    }

    fn set_handle(&self, id: u16, handle: u32) -> Result<(), c_int> {
        let at = self.attribute(id)?;
        // SAFETY: as in `attribute`; the last 8 bytes.
        unsafe { at.add(8).cast::<u64>().write_unaligned(u64::from(handle)) };
        Ok(())
    }

    fn handle(&self, id: u16) -> Result<u32, c_int> {
        u32::try_from(self.data(id)?).map_err(|_| libc::EINVAL)
    }

    /// The bytes of an input; up to 8 lie in the attribute itself.
    fn input(&self, id: u16) -> Result<Vec<u8>, c_int> {
        let (length, data) = (self.length(id)?, self.data(id)?);
        if length <= 8 {
            return Ok(data.to_ne_bytes()[..length].to_vec());
        }
        let from = std::ptr::with_exposed_provenance::<u8>(data as usize);
        // SAFETY: an input of more than 8 bytes is a pointer to as many as its length says.
        Ok(unsafe { std::slice::from_raw_parts(from, length) }.to_vec())
    }

    fn number(&self, id: u16) -> Result<u64, c_int> {
        let input = self.input(id)?;
        Ok(Input(&input).u64(0))
    }

    /// Fills an output from the front.
    fn output(&self, id: u16, bytes: &[u8]) -> Result<(), c_int> {
        let (length, data) = (self.length(id)?, self.data(id)?);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(data as usize);
        // SAFETY: an output is a pointer to as many bytes as its length says.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len().min(length)) };
        Ok(())
    }
}

/// Answers a request.
///
/// # Safety
/// `header` is a `struct ib_uverbs_ioctl_hdr` with as many attributes behind it as it says, whose pointers are
/// valid for their lengths.
pub(crate) unsafe fn answer(device: &mut Device, header: *mut u8) -> Result<(), c_int> {
    // SAFETY: by this function's contract: length, object, method, number of attributes.
    let [_, object, method, count] = unsafe { header.cast::<[u16; 4]>().read_unaligned() };
    let request = Request { header, count: usize::from(count) };
    match (object, method) {
        (OBJECT_UAR, FIRST) => {
            let (handle, offset, number) = device.add_page()?;
            request.set_handle(FIRST, handle)?;
            request.output(THIRD, &offset.to_ne_bytes())?;
            request.output(FOURTH, &4096_u32.to_ne_bytes())?;
            request.output(FIFTH, &number.to_ne_bytes())
        }
        (OBJECT_UAR, SECOND) => match take(device, request.handle(FIRST)?)? {
            Object::Page(offset) => {
                device.remove_page(offset);
                Ok(())
            }
            other => put_back(device, request.handle(FIRST)?, other),
        },
        (OBJECT_DEVX_UMEM, FIRST) => {
            let (mut address, bytes) = (request.number(SECOND)?, request.number(THIRD)?);
            if request.attribute(SEVENTH).is_ok() {
                address = by_dmabuf(&request, SEVENTH, [address, bytes])?;
            } else {
                by_address(address, bytes)?;
            }
            let id = device.hca.register_umem(address, bytes);
            let handle = device.add(Object::Umem(id));
            request.set_handle(FIRST, handle)?;
            request.output(FIFTH, &id.to_ne_bytes())
        }
        (OBJECT_DEVX_UMEM, SECOND) => match take(device, request.handle(FIRST)?)? {
            Object::Umem(id) => {
                device.hca.free_umem(id);
                Ok(())
            }
            other => put_back(device, request.handle(FIRST)?, other),
        },
        (OBJECT_MR, REG_DMABUF_MR) => register_dmabuf(device, &request),
        (OBJECT_DEVX, THIRD) => request.output(SECOND, &5_u32.to_ne_bytes()),
        (OBJECT_DEVX, FIRST) => command(device, &request, FIRST, SECOND).map(drop),
        (OBJECT_DEVX_OBJ, method) => devx_object(device, &request, method),
        _ => Err(libc::EPROTONOSUPPORT),
    }
}

/// The address of the range of a dmabuf, which is memory of a GPU: its offset and its length.
fn by_dmabuf(request: &Request, fd: u16, [offset, bytes]: [u64; 2]) -> Result<u64, c_int> {
    let (address, room) = hooks::behind(request.data(fd)? as c_int).ok_or(libc::EINVAL)?;
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= room);
    let address = address + offset;
    if inside && gpu::prepare(address, bytes) { Ok(address) } else { Err(libc::EINVAL) }
}

/// Attributes: handle, domain, offset, length, address, descriptor, rights, and the two keys.
fn register_dmabuf(device: &mut Device, request: &Request) -> Result<(), c_int> {
    let pd = match device.objects.get(&request.handle(1)?) {
        Some(Object::Pd(pd)) => *pd,
        _ => return Err(libc::EINVAL),
    };
    let [offset, bytes, address] = [2, 3, 4].map(|id| request.number(id));
    let (offset, bytes, address) = (offset?, bytes?, address?);
    let memory = by_dmabuf(request, 5, [offset, bytes])?;
    let access = Access(Input(&request.input(6)?).u32(0) & Access::ALL.0);
    let region = Region { pd, address, bytes, memory, access };
    let key = device.hca.register(region).map_err(|_| libc::EINVAL)?;
    let handle = device.add(Object::Region(key));
    request.set_handle(0, handle)?;
    request.output(7, &key.to_ne_bytes())?;
    request.output(8, &key.to_ne_bytes())
}

fn devx_object(device: &mut Device, request: &Request, method: u16) -> Result<(), c_int> {
    match method {
        FIRST => {
            let input = request.input(SECOND)?;
            let output = command(device, request, SECOND, THIRD)?;
            let number = u32::from_be_bytes([0, output[9], output[10], output[11]]);
            let object = match OPCODE.get(&input) {
                0x400 => Object::DevxCq(number),
                0x500 => Object::DevxQp(number),
                _ => return Err(libc::EINVAL),
            };
            let handle = device.add(object);
            request.set_handle(FIRST, handle)
        }
        SECOND => match take(device, request.handle(FIRST)?)? {
            Object::DevxCq(cqn) => {
                device.hca.destroy_cq(cqn);
                Ok(())
            }
            Object::DevxQp(qpn) => {
                device.hca.destroy_qp(qpn);
                Ok(())
            }
            other => put_back(device, request.handle(FIRST)?, other),
        },
        THIRD | FOURTH => command(device, request, SECOND, THIRD).map(drop),
        _ => Err(libc::EPROTONOSUPPORT),
    }
}

/// Passes a mailbox to the device, and returns its answer.
fn command(
    device: &mut Device,
    request: &Request,
    input: u16,
    output: u16,
) -> Result<Vec<u8>, c_int> {
    let input = request.input(input)?;
    // A command that the device refuses is in its log, and ends the process.
    let mut answer = device.hca.command(&input).map_err(|_| libc::EREMOTEIO)?;
    answer.resize(answer.len().max(16), 0);
    request.output(output, &answer)?;
    if STATUS.get(&answer) == 0 { Ok(answer) } else { Err(libc::EREMOTEIO) }
}

fn take(device: &mut Device, handle: u32) -> Result<Object, c_int> {
    device.objects.remove(&handle).ok_or(libc::EINVAL)
}

/// Refuses a handle of another kind, and stores its object again.
fn put_back(device: &mut Device, handle: u32, object: Object) -> Result<(), c_int> {
    device.objects.insert(handle, object);
    Err(libc::EINVAL)
}
