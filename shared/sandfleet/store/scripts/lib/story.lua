-- Append to the story of a sandbox or node. `extra` is a JSON fragment (`,"k":v`) or ''.
local function story(id, ms, event, extra)
  local key = P .. 'story:' .. id
  call('RPUSH', key, '{"at_ms":' .. ms .. ',"event":"' .. event .. '"' .. extra .. '}')
  call('LTRIM', key, -100, -1)
  call('PEXPIRE', key, DAY)
end

-- Fragments. Epochs are spliced as text: cjson would print 14 digits of the 16.
local function text(name, value)
  return ',"' .. name .. '":' .. cjson.encode(value)
end

local function where(route)
  local sid, node, inc, epoch = split(route)
  return text('node_id', node) .. text('incarnation', inc) .. ',"epoch":' .. epoch
end
