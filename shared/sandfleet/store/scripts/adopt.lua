-- A node re-announces a sandbox it holds: live again unless somebody newer owns the thread.
-- KEYS  1 prefix
-- ARGV  1 digest  2 thread id  3 user id or ''  4 backend  5 spec JSON  6 sandbox  7 node  8 incarnation  9 epoch
--       10 data id  11 its age, ms
-- Returns 'adopted' | 'newer' | 'no_lease'
--@use time route story reply line use waiters sandbox
local ms = now_ms()
local sid, node, inc, epoch = A[6], A[7], A[8], tonumber(A[9])
local route = sid .. '|' .. node .. '|' .. inc .. '|' .. A[9]
if call('HGET', P .. 'node:' .. node, 'incarnation') ~= inc or call('GET', P .. 'lease:' .. node) ~= inc then
  return 'no_lease'
end
local thread = P .. 'thread:' .. A[1]
local t = call('HMGET', thread, 'epoch', 'sandbox_id')
if tonumber(t[1] or 0) > epoch then return 'newer' end
local holder = call('GET', P .. 'id:' .. sid)
if holder and holder ~= A[1] then return 'newer' end

local old, same = nil, false
if t[2] then
  local sb = call('HMGET', P .. 'sandbox:' .. t[2], 'owner', 'state', 'route')
  if sb[1] == A[1] then
    old = sb[3]
    local _, old_node, old_inc, old_epoch = split(old)
    same = tonumber(old_epoch) == epoch
    if same and (old_node ~= node or t[2] ~= sid or sb[2] == 'stopping') then return 'newer' end
    if same and sb[2] == 'live' and old_inc == inc then return 'adopted' end
  end
end

-- It runs and may be in use, so it has a place, even one too many.
if old and not same then forget(t[2], old, ms) end
call('HSET', thread, 'sandbox_id', sid, 'data_id', A[10], 'epoch', A[9])
call('PEXPIRE', thread, KEEP)
call('SET', P .. 'id:' .. sid, A[1], 'PX', KEEP)
local key = P .. 'sandbox:' .. sid
call('HSETNX', key, 'created', ms - tonumber(A[11]))
call('HSET', key, 'owner', A[1], 'state', 'live', 'route', route, 'thread', A[2], 'user', A[3], 'backend', A[4],
  'spec', A[5], 'used', ms)
call('PEXPIRE', key, KEEP)
take_place(sid, node, A[3], '+inf')
call('ZADD', P .. 'sandboxes', 0, sid)
keep(P .. 'sandboxes', KEEP)
call('ZREM', P .. 'warm:' .. node, sid)
grant_waiters(A[1], route, ms, 'false')
-- Whoever was in it has not said so again yet: until then it is in use, so that nobody evicts it.
if tonumber(call('HGET', P .. 'fleet', 'recovering') or 0) > ms then
  call('ZADD', P .. 'agents:' .. sid, ms + 25000, 'recovering')
  keep(P .. 'agents:' .. sid, 2 * DAY)
end
settle(sid, route, ms)
story(sid, ms, 'adopted', where(route))
return 'adopted'
